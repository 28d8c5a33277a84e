"""Small posteriors for every likelihood of `support.cases`, with targets drawn from the model."""

import torch
from torch import nn

import ssla
from ssla import priors
from support.cases import CASES
from support.refits import inputs, seeded

# the teacher's biases where zero is outside the domain, or too near to its boundary
BIASES = {"natural": (0.3, -1.0), "scaled natural": (0.3, -1.0), "poisson identity": (6.0,)}
CANDIDATES = {
    "real": (0.4, 1.5),
    "count": (1.0, 5.0),
    "class": (0.0, 1.0),
    "vector": ((0.0, 0.5), (1.0, -1.0)),
}


def teacher(outputs, bias, dtype=torch.float64):
    """A network with two tanh units that do different things, so that its mode is well determined
    and all its weights can be refitted.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, outputs))
    first = torch.tensor([[1.2, 0.3], [-0.4, 1.1]])
    last = torch.tensor([[1.0, -0.6], [0.3, 0.5], [-0.8, 0.7]])[:outputs]
    with torch.no_grad():
        for parameter, value in zip(
            model.parameters(), (first, torch.tensor([0.2, -0.3]), last, bias), strict=True
        ):
            parameter.copy_(torch.as_tensor(value))
    return model.to(dtype)


def problem(
    name,
    weights="last_layer",
    mode="tilt",
    n=80,
    precision=0.5,
    dtype=torch.float64,
    row_weights=None,
):
    """A posterior under a Gaussian prior at (or, with "tilt" and "as_is", near) its mode; two new
    inputs; and two y.
    """
    likelihood, outputs = CASES[name][0], CASES[name][1].shape[1]
    model = teacher(outputs, BIASES.get(name, (0.2,) * outputs))
    x = inputs(n, 5)
    with torch.no_grad():
        y = likelihood.predictive.sample(model(x), 1, seeded(7))[0]
    data = (x, y) if row_weights is None else (x, y, row_weights)
    train(model, likelihood, data, precision)
    if mode != "polish":
        with torch.no_grad():
            for parameter in model[2].parameters():
                parameter.mul_(0.995)
    data = (x.to(dtype), *data[1:])
    post = ssla.fit(
        model.to(dtype),
        data,
        likelihood=likelihood,
        prior=priors.Gaussian(precision),
        gaussian="laplace",
        weights=weights,
        mode=mode,
    )
    candidates = CANDIDATES[likelihood.support_for(outputs).kind]
    return post, inputs(2, 6).to(dtype), torch.tensor(candidates, dtype=torch.float64)


def train(model, likelihood, data, precision):
    """To the mode of all weights, by L-BFGS."""
    x, y, *rest = data
    w = rest[0] if rest else torch.ones(len(y))
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-8
    )

    def loss():
        optimiser.zero_grad()
        squares = sum((parameter**2).sum() for parameter in model.parameters())
        value = 0.5 * precision * squares - (w * likelihood.log_prob(y, model(x))).sum()
        value.backward()
        return value

    optimiser.step(loss)
