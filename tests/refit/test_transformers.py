"""All weights of a transformer, refitted: the gradient at the mode found by plain torch."""

import torch
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from support.plain_network import Y, numbers


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, 1)
        self.double().eval()

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def trained(model, x, y, precision, noise=0.5):
    """At its mode under Gaussian noise and prior, by L-BFGS."""
    model.requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def loss():
        optimiser.zero_grad()
        value = ((model(x)[:, 0] - y) ** 2).sum() / noise**2 / 2
        value = value + precision / 2 * sum((p**2).sum() for p in model.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return model.eval()


def test_all_weights_of_a_transformer_are_refitted():
    x, y, enabled = numbers(30, 3, 4), Y, torch.backends.mha.get_fastpath_enabled()
    model = trained(Encoder().train(), x, y, 30.0)
    post = ssla.fit(
        model,
        (x, y),
        weights="all",
        likelihood=L.Gaussian(noise=0.5),
        prior=priors.Gaussian(precision=30.0),
    )
    increments = ssla.ssla(post, x[:1], y[:1], ssla.WeightRefit(on_failure="raise"))
    log_density = ssla.WeightRefit()(post, x[:1])
    theta = log_density.find_weights_at_modes(y[:1])[0]
    names = post.network.layout.unpack(theta)
    twin = Encoder()  # at θ̃ the gradient of the augmented objective is that of the tilt
    twin.load_state_dict(names)
    twin.requires_grad_(True)
    whole, target = torch.cat([x, x[:1]]), torch.cat([y, y[:1]])
    with torch.enable_grad():
        value = -((twin(whole)[:, 0] - target) ** 2).sum() / 0.5 - 15 * sum(
            (p**2).sum() for p in twin.parameters()
        )
    value.backward()
    gradient = post.network.layout.pack({name: p.grad for name, p in twin.named_parameters()})
    tilt = post.statistics.gradient + post.bound_prior.gradient(post.theta)
    assert torch.allclose(gradient, tilt, atol=1e-6)
    assert torch.isfinite(increments.total).all()
    assert torch.backends.mha.get_fastpath_enabled() == enabled
