"""Posteriors whose refits a brute-force optimiser can repeat."""

import torch
from torch import distributions, nn

import ssla
from ssla import likelihoods as L
from ssla import priors


def T(*values):
    return torch.tensor(values, dtype=torch.float64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def inputs(n, seed, width=2):
    return torch.randn(n, width, dtype=torch.float64, generator=seeded(seed))


def noisy(x, scale=0.5, seed=9):
    return torch.sin(x[:, 0]) + scale * torch.randn(
        len(x), dtype=torch.float64, generator=seeded(seed)
    )


def counts_at(x):
    return torch.poisson((0.5 + 0.7 * x[:, 0]).exp(), generator=seeded(3))


def classes_at(x):
    return (
        x[:, 0] + 0.5 * torch.randn(len(x), dtype=torch.float64, generator=seeded(4)) > 0
    ).long() + (x[:, 1] > 0.7).long()


# name: (ssla's likelihood, the same by torch.distributions, outputs, targets, candidate y)
FAMILIES = {
    "gaussian": (
        L.Gaussian(noise=0.5),
        lambda f: distributions.Normal(f[..., 0], 0.5),
        1,
        noisy,
        T(-2, 0, 1, 3),
    ),
    "heteroscedastic": (
        L.HeteroscedasticGaussian(),
        lambda f: distributions.Normal(f[..., 0], (f[..., 1] / 2).exp()),
        2,
        noisy,
        T(-1.5, -0.3, 0.4, 2.0),
    ),
    "poisson": (
        L.Poisson(),
        lambda f: distributions.Poisson(f[..., 0].exp()),
        1,
        counts_at,
        T(0, 1, 4, 9),
    ),
    "bernoulli": (
        L.Bernoulli(),
        lambda f: distributions.Bernoulli(logits=f[..., 0]),
        1,
        lambda x: classes_at(x).clamp_max(1).double(),
        T(0, 1),
    ),
    "categorical": (
        L.Categorical(),
        lambda f: distributions.Categorical(logits=f),
        3,
        classes_at,
        T(0, 1, 2),
    ),
    "student": (
        L.StudentT(4.0, 0.4),
        lambda f: distributions.StudentT(4.0, f[..., 0], 0.4),
        1,
        noisy,
        T(-1, 0, 1, 2),
    ),
}


def last_layer(name, n=70, width=4, weights=None, **options):
    """A fitted last layer, its features at x, and the oracle's two functions of a flat θ
    (outputs × features).
    """
    likelihood, law, outputs, targets, candidates = FAMILIES[name]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    x = inputs(n, 5)
    y = targets(x)
    data = (x, y) if weights is None else (x, y, weights)
    prior = priors.Gaussian(precision=0.8, mean=0.1)
    post = ssla.fit(model, data, likelihood=likelihood, prior=prior, gaussian="laplace")
    if options:  # a network near its mode, not at it
        with torch.no_grad():
            for name_, value in model[2].named_parameters():
                value.copy_(0.97 * post.parameters[f"2.{name_}"] + 0.01)
        post = ssla.fit(
            model, data, likelihood=likelihood, prior=prior, gaussian="laplace", **options
        )
    new = inputs(3, 6)

    def features(a):
        with torch.no_grad():
            return torch.cat([model[1](model[0](a)), torch.ones(len(a), 1)], 1)

    phi, phi_new = features(x), features(new)
    w = torch.ones(n) if weights is None else weights

    def log_joint(t):
        theta = t.reshape(outputs, -1)
        return (w * law(phi @ theta.mT).log_prob(y)).sum() - 0.4 * ((t - 0.1) ** 2).sum()

    def log_new(i, value):
        return lambda t: law(phi_new[i] @ t.reshape(outputs, -1).mT).log_prob(value)

    return post, new, candidates, log_joint, log_new


def small_network(name, n=60, hidden=2, dtype=torch.float64, mode="tilt", steps=400, **options):
    """A tanh network trained for a while, all its weights free, and the oracle's functions of a
    flat θ.
    """
    likelihood, law, outputs, targets, candidates = FAMILIES[name]
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    x = inputs(n, 5)
    y = targets(x)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        value = -law(model(x)).log_prob(y).sum() + 0.15 * sum(
            (p**2).sum() for p in model.parameters()
        )
        value.backward()
        return value

    optimiser.step(loss)
    with torch.no_grad():
        for p in model.parameters():  # near the mode, not at it
            p.mul_(0.998)
    model = model.to(dtype)
    prior = priors.Gaussian(precision=0.3)
    post = ssla.fit(
        model,
        (x.to(dtype), y),
        likelihood=likelihood,
        prior=prior,
        gaussian="laplace",
        weights="all",
        mode=mode,
        **options,
    )
    wide = {key: value.double() for key, value in model.state_dict().items()}
    new = inputs(2, 6)

    def run(t, a):
        return torch.func.functional_call(
            model, post.network.layout.unpack(t) if len(t) else wide, (a,)
        )

    def log_joint(t):
        return law(run(t, x)).log_prob(y).sum() - 0.15 * (t**2).sum()

    def log_new(i, value):
        return lambda t: law(run(t, new[i : i + 1])[0]).log_prob(value)

    def outputs_of(t, augmented):
        rows = x if augmented is None else torch.cat([x, new[augmented : augmented + 1]])
        return run(t, rows)

    return post, new, candidates, log_joint, log_new, outputs_of


def class_problem(
    n=150, width=12, classes=4, dtype=torch.float64, precision=1.0, noise=1.0, **options
):
    """Classes around random centres, a last layer trained on them, and new inputs."""
    generator = seeded(3)
    centres = torch.randn(classes, width, generator=generator)
    y = torch.randint(classes, (n,), generator=generator)
    x = (centres[y] + noise * torch.randn(n, width, generator=generator)).to(dtype)
    torch.manual_seed(0)
    model = nn.Linear(width, classes).to(dtype)
    likelihood = options.pop("likelihood", L.Categorical())
    data = (x, y) if "weights" not in options else (x, y, options.pop("weights"))
    options = {
        "prior": priors.Gaussian(precision),
        "gaussian": "laplace",
        "mode": "polish",
    } | options
    if options["mode"] != "polish":  # a network near its mode, not at it
        near = ssla.fit(model, data, likelihood=likelihood, **(options | {"mode": "polish"}))
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(0.99 * near.parameters[name])
    post = ssla.fit(model, data, likelihood=likelihood, **options)
    new = (centres.repeat(2, 1) + noise * torch.randn(2 * classes, width, generator=generator)).to(
        dtype
    )
    return post, new


def all_classes(post, new):
    return torch.arange(post.report.outputs).double().expand(len(new), -1)
