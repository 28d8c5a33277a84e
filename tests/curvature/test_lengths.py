"""Sequences of several lengths: sums over rows and places."""

import pytest
import torch

import ssla
from support.plain_network import FIT, Tokens, Y, numbers


@pytest.mark.parametrize("structure", ["dense", "kfac", "diag", "low_rank"])
@pytest.mark.parametrize("weights", ["last_layer", "all", ["inner.weight", "head.weight"]])
def test_sequences_of_several_lengths_are_summed_and_predicted(structure, weights):
    long, short = torch.arange(96).reshape(12, 8) % 6, torch.arange(54).reshape(18, 3) % 6
    batches = [(long, Y[:12]), (short, Y[12:])]
    fit = lambda data: ssla.fit(
        Tokens(), data, weights=weights, structure=structure, mode="tilt", **FIT
    )
    post = fit(batches)
    apart = fit(batches[:1]).merge(fit(batches[1:]))  # each length by itself
    assert torch.allclose(post.statistics.gradient, apart.statistics.gradient, atol=1e-12)
    probe = numbers(post.theta.numel(), seed=5)
    S, S_apart = (p.statistics.curvature.push(probe) for p in (post, apart))
    assert torch.allclose(S, S_apart, atol=1e-10 * float(S.abs().max()))
    other = torch.arange(25).reshape(5, 5) % 6
    assert torch.equal(post.predict(other).mean, post.predict(other.double()).mean)
    assert post.marginal(other).covariance.shape == (5, 1, 1)


def test_kfac_over_several_lengths_counts_every_place_once():
    """A and G by hand: sums over rows and places, divided by the number of places of all rows
    together.
    """
    long, short = torch.arange(96).reshape(12, 8) % 6, torch.arange(54).reshape(18, 3) % 6
    model = Tokens()
    post = ssla.fit(
        model,
        [(long, Y[:12]), (short, Y[12:])],
        weights="all",
        structure="kfac",
        mode="tilt",
        **FIT,
    )
    a, d = [], []
    for ids in (long, short):
        for row in ids:
            at = model.table(row).detach()
            before = model.inner(at).detach().requires_grad_(True)
            model.head(torch.tanh(before).mean(0)).backward()
            a.append(torch.cat([at, torch.ones(len(at), 1, dtype=torch.float64)], 1))
            d.append(before.grad)
    a, d = torch.cat(a), torch.cat(d)
    factors = next(f for f in post.statistics.curvature.layers if f.A.shape == (5, 5))
    assert torch.allclose(factors.A, a.mT @ a, atol=1e-10)
    assert torch.allclose(factors.G, d.mT @ d / 0.25, atol=1e-10)
    assert factors.count == len(a) == 12 * 8 + 18 * 3
