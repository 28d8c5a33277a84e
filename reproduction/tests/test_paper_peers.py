"""Peers' answers beside SciPy's, and laplace-torch beside our own Laplace."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from ssla_paper.networks import Recipe, perceptron, squared_error, train
from ssla_paper.peers import GaussianMixture, MissingPeerError, library, scores


def mixed():
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    sds = 0.2 + torch.rand(7, 4, generator=generator, dtype=torch.float64)
    return GaussianMixture(means, sds)


def test_a_mixture_is_what_scipy_says():
    p, y = mixed(), torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    for i in range(4):
        parts = [
            stats.norm(m, s)
            for m, s in zip(p.means[:, i].numpy(), p.sds[:, i].numpy(), strict=True)
        ]
        assert float(p.log_prob(y)[i]) == pytest.approx(
            np.log(np.mean([d.pdf(float(y[i])) for d in parts])), abs=1e-12
        )

        def cdf(t, parts=parts):
            return np.mean([d.cdf(t) for d in parts])

        low, high = p.interval(0.9)[i].tolist()
        assert cdf(low) == pytest.approx(0.05, abs=1e-10)
        assert cdf(high) == pytest.approx(0.95, abs=1e-10)
        below, _ = integrate.quad(lambda t: cdf(t) ** 2, -12, float(y[i]), epsabs=1e-10)
        above, _ = integrate.quad(lambda t: (1 - cdf(t)) ** 2, float(y[i]), 12, epsabs=1e-10)
        assert float(p.crps(y)[i]) == pytest.approx(below + above, abs=1e-7)


def test_scores_of_a_mixture_of_one_are_those_of_the_gaussian():
    y = torch.linspace(-1, 1, 5, dtype=torch.float64)
    found = scores(GaussianMixture(torch.zeros(1, 5).double(), torch.full((1, 5), 0.5).double()), y)
    assert found["nll"] == pytest.approx(-stats.norm(0, 0.5).logpdf(y.numpy()).mean(), abs=1e-12)
    assert found["cover95"] == 60.0  # ±0.98 holds three of five
    assert found["width95"] == pytest.approx(2 * 0.5 * stats.norm.ppf(0.975), abs=1e-9)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"means and sds must both be \(S, N\)"):
        GaussianMixture(torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="sds positive"):
        GaussianMixture(torch.zeros(1, 3), torch.zeros(1, 3))


def test_a_missing_library_says_what_to_install():
    with pytest.raises(MissingPeerError, match=r"needs nothing-such .*make paper"):
        library("nothing_such_module", "nothing-such")


def test_the_papers_training_keeps_the_best_weights_and_is_seeded():
    def once():
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(60, 1, generator=generator)
        y = x[:, 0].sin()
        net = perceptron(1, 1, generator)
        best = train(
            net, (x[:40], y[:40]), (x[40:], y[40:]), squared_error, Recipe(epochs=200), generator
        )
        assert float(squared_error(net(x[40:]).detach(), y[40:])) == pytest.approx(best, rel=1e-6)
        return best, [p.detach().clone() for p in net.parameters()]

    (best, weights), (again, others) = once(), once()
    assert best == again < 0.05
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_laplace_torch_beside_our_own():
    pytest.importorskip("laplace")
    import ssla
    from ssla_paper.peers.laplace import laplace

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    x, new = torch.randn(30, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    y = net(x).detach()[:, 0] + 0.3 * torch.randn(30, dtype=torch.float64)
    theirs = laplace(net, x, y, new, structure="full", noise=1.0)
    with pytest.warns(UserWarning, match="not at the mode"):
        posterior = ssla.fit(
            net,
            (x, y),
            likelihood=ssla.likelihoods.Gaussian(noise=1.0),
            prior=ssla.priors.Gaussian(),
            mode="as_is",
        )
    f, K = posterior.marginal(new)
    assert torch.allclose(theirs.means[0], f[:, 0], atol=1e-10)
    assert torch.allclose(theirs.sds[0], (K[:, 0, 0] + 1).sqrt(), atol=1e-8)
    fitted = laplace(net, x, y, new, structure="full")
    assert 0.2 < float(fitted.sds.min()) < float(fitted.sds.max()) < 0.6  # the noise was found
    halves = torch.full((30,), 0.5, dtype=torch.float64)
    for subset in ("last_layer", "all"):
        plain = laplace(net, x, y, new, structure="full", noise=1.0, subset=subset)
        scaled = laplace(
            net,
            x,
            y,
            new,
            structure="full",
            noise=2.0,
            subset=subset,
            scale=halves,
            new_scale=halves[:6],
        )
        assert torch.allclose(scaled.means, plain.means, atol=1e-10)  # σ = 0.5 · 2
        assert torch.allclose(scaled.sds, plain.sds, atol=1e-8)
