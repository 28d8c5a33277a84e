"""Every prior: normalised as SciPy has it, differentiated as autograd and finite differences
have it, concave where it says.
"""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import distributions as dist

from ssla import priors
from ssla.network.layout import make_contiguous_layout, make_last_layer_layout
from ssla.priors import as_prior, describe, indefinite
from support.oracles import finite_difference

LAYOUT = make_last_layer_layout("head.weight", "head.bias", outputs=2, inputs=3)
PAIR = make_contiguous_layout({"mu": torch.Size([1]), "log_variance": torch.Size([1])})
ONE = make_contiguous_layout({"theta": torch.Size([1])})
COVARIANCE = torch.eye(8, dtype=torch.float64) + 0.3

CASES = {
    "gaussian": priors.Gaussian(precision=2.0, mean=0.3),
    "laplace": priors.Laplace(scale={"head.weight": 0.5, "head.bias": 2.0}, loc=0.1),
    "student": priors.StudentT(df=4.0, scale=0.7, loc=-0.2),
    "horseshoe": priors.Horseshoe(scale=0.5, smoothing=0.2),
    "spike and slab": priors.SpikeSlab(spike=0.3, slab=2.0, weight=0.4),
    "gamma of log rates": priors.Gamma(shape=3.0, rate=2.0),
    "gamma of rates": priors.Gamma(shape=3.0, rate=2.0, link="identity"),
    "product": priors.Product(
        {
            "head.weight": priors.Laplace(0.5),
            "head.bias": priors.NormalInverseGamma(0.1, 2.0, 3.0, 1.5),
        }
    ),
    "custom": priors.custom(lambda t: -0.5 * (t**2).sum() - torch.cos(t.sum())),
    "custom by name": priors.custom(
        lambda p: -(p["head.weight"] ** 4).sum() - (p["head.bias"] ** 2).sum(), by_name=True
    ),
    "custom independent": priors.custom(
        lambda t: -torch.cosh(t) * torch.arange(1.0, 9.0), independent=True
    ),
    "torch number": as_prior(dist.Laplace(0.25, 1.5)),
    "torch batch": as_prior(dist.Normal(torch.arange(8.0), 1.0)),
    "torch event": as_prior(
        dist.MultivariateNormal(torch.zeros(8, dtype=torch.float64), COVARIANCE)
    ),
    "torch unconstrained": priors.FromDistribution(dist.Gamma(3.0, 2.0), unconstrained=True),
}
THETA = torch.tensor([0.4, 1.3, 0.2, 0.9, 2.1, 0.05, 0.6, 1.7], dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_gradient_and_curvature_are_the_derivatives_of_the_log_density(name):
    bound = CASES[name].bind(LAYOUT)
    theta = THETA.clone()
    gradient = finite_difference(lambda t: bound.log_prob(t.squeeze(0)).reshape(1), theta[None])[0]
    assert (bound.gradient(theta) - gradient).abs().max() < 1e-7 * (1 + gradient.abs().max())
    precision = bound.precision(theta)
    H = torch.diag(precision) if precision.dim() == 1 else precision
    hessian = torch.autograd.functional.hessian(bound.log_prob, theta)
    assert (H + hessian).abs().max() < 1e-10 * (1 + hessian.abs().max())
    assert not theta.requires_grad


@pytest.mark.parametrize("name", CASES)
def test_a_diagonal_curvature_is_given_as_a_diagonal(name):
    dense = name in ("product", "custom", "torch event")
    assert CASES[name].bind(LAYOUT).precision(THETA).dim() == (2 if dense else 1)


@pytest.mark.parametrize(
    ("prior", "reference"),
    [
        (priors.Laplace(0.7, loc=0.3, smoothing=1e-9), stats.laplace(0.3, 0.7).logpdf),
        (priors.StudentT(4.0, scale=0.7, loc=-0.2), stats.t(4.0, -0.2, 0.7).logpdf),
        (priors.Gamma(3.0, 2.0, link="identity"), stats.gamma(3.0, scale=0.5).logpdf),
        (priors.Gamma(3.0, 2.0, link="log"), lambda t: stats.gamma(3.0, scale=0.5).logpdf(np.exp(t)) + t),
        (CASES["torch unconstrained"], lambda t: stats.gamma(3.0, scale=0.5).logpdf(np.exp(t)) + t),
        (as_prior(dist.Laplace(0.2, 1.5)), stats.laplace(0.2, 1.5).logpdf),
    ],
)  # fmt: skip
def test_densities_are_those_of_scipy(prior, reference):
    bound = prior.bind(ONE)
    for t in (0.05, 0.4, 2.5):
        assert (
            abs(float(bound.log_prob(torch.tensor([t], dtype=torch.float64))) - reference(t)) < 1e-7
        )


@pytest.mark.parametrize(
    "prior",
    [priors.Laplace(0.7, 0.3), priors.Horseshoe(0.5, 0.2), priors.SpikeSlab(), priors.StudentT()],
)
def test_rounded_densities_integrate_to_one(prior):
    bound = prior.bind(ONE)
    density = lambda t: math.exp(float(bound.log_prob(torch.tensor([t], dtype=torch.float64))))
    total = sum(
        integrate.quad(density, *ends, limit=400)[0]
        for ends in [(-np.inf, -1), (-1, 0), (0, 1), (1, np.inf)]
    )
    assert abs(total - 1) < 1e-7


def test_normal_inverse_gamma_is_the_density_of_mu_and_log_variance():
    bound = priors.NormalInverseGamma(mean=0.5, strength=2.0, shape=3.0, scale=1.5).bind(PAIR)
    for mu, s in [(0.2, -0.4), (1.5, 0.8)]:
        expected = (
            stats.invgamma(3.0, scale=1.5).logpdf(math.exp(s))
            + s
            + stats.norm(0.5, math.sqrt(math.exp(s) / 2)).logpdf(mu)
        )
        assert (
            abs(float(bound.log_prob(torch.tensor([mu, s], dtype=torch.float64))) - expected)
            < 1e-12
        )


def test_the_order_of_names_is_kept():
    """θ interleaves a last layer's weights and bias; priors see the named order."""
    by_vector = as_prior(dist.Normal(torch.arange(8.0, dtype=torch.float64), 1.0)).bind(LAYOUT)
    by_setting = priors.Gaussian(mean=torch.arange(8.0)).bind(LAYOUT)
    assert torch.allclose(by_vector.gradient(THETA), by_setting.gradient(THETA))
    product = priors.Product({"head": priors.Gaussian(3.0), "head.bias": priors.Flat()}).bind(
        LAYOUT
    )
    assert product.precision(THETA).tolist() == [3, 3, 3, 0, 3, 3, 3, 0]


def test_where_the_log_density_is_not_concave_is_counted():
    bound = priors.StudentT(df=1.0).bind(LAYOUT)
    assert indefinite(bound.precision(THETA)) == int((THETA > 1).sum())
    assert indefinite(priors.Laplace().bind(LAYOUT).precision(THETA)) == 0
    assert (
        indefinite(
            priors.custom(lambda t: (t**2).sum() - 3 * t.sum() ** 2).bind(ONE).precision(THETA[:1])
        )
        == 0
    )
    assert indefinite(priors.custom(lambda t: t[0] * t[1]).bind(PAIR).precision(THETA[:2])) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: priors.Laplace(scale=-1.0), "prior scale must be positive"),
        (lambda: priors.Laplace(smoothing=0.0), "smoothing must be positive.*width"),
        (lambda: priors.StudentT(df=0.0), "df must be positive"),
        (lambda: priors.Horseshoe(smoothing=-1.0), "smoothing must be positive"),
        (lambda: priors.SpikeSlab(weight=1.0), "weight must be strictly between 0 and 1"),
        (lambda: priors.Gamma(3.0, 0.0), "prior rate must be positive"),
        (lambda: priors.Gamma(3.0, 1.0, link="lgo"), "Unknown link 'lgo'. Did you mean 'log'"),
        (lambda: priors.NormalInverseGamma(strength=0.0), "strength, shape and scale must be "
                                                          "positive"),
        (lambda: priors.NormalInverseGamma().bind(LAYOUT), r"over two parameters.*given 8. Name them"),
        (lambda: priors.Product({"hed": priors.Flat()}).bind(LAYOUT), r"Unknown layer or parameter in the prior 'hed'.*'head'"),
        (lambda: priors.Product({"head.bias": priors.Flat()}).bind(LAYOUT), "no prior for "
                                                                            "head.weight"),
        (lambda: as_prior(dist.Normal(torch.zeros(3), 1.0)).bind(LAYOUT), "over 3 numbers, but "
                                                                          "there are 8 free "
                                                                          "parameters"),
        (lambda: priors.custom(lambda t: t).bind(LAYOUT).log_prob(THETA), r"one number.*a tensor of shape \(8,\)"),
        (lambda: priors.custom(lambda t: 1.0).bind(LAYOUT).log_prob(THETA), "must return one "
                                                                            "number.*returned a "
                                                                            "float"),
        (lambda: priors.custom(lambda t: t, independent=True, by_name=True), "not both"),
    ],
)  # fmt: skip
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("bad", [1.0, priors.Laplace, priors.Product])
def test_a_prior_is_an_object(bad):
    with pytest.raises(TypeError, match="prior must be an object such as"):
        as_prior(bad)


def test_product_and_custom_refuse_what_they_cannot_use():
    with pytest.raises(TypeError, match="Product takes a dict"):
        priors.Product([priors.Flat()])
    with pytest.raises(TypeError, match="custom needs a function"):
        priors.custom(3.0)
    with pytest.raises(ValueError, match=r"dense Hessian.*independent=True"):
        priors.custom(lambda t: t.sum()).bind(ONE).precision(torch.zeros(5000))
    assert len(describe(priors.Gaussian(mean=torch.arange(500.0)))) < 170
