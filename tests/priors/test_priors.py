"""Priors bound to layouts: numbers, layers, names, tensors."""

import pytest
import torch
from scipy import stats

from ssla import priors
from ssla.network.layout import make_contiguous_layout, make_last_layer_layout

LAYOUT = make_last_layer_layout("head.weight", "head.bias", outputs=2, inputs=3)
MIXED = make_contiguous_layout(
    {"a.weight": torch.Size([2, 2]), "a.bias": torch.Size([2]), "b.scale": torch.Size([1])}
)


def test_log_prob_gradient_and_precision_agree():
    bound = priors.Gaussian(
        precision={"a": 2.0, "b": 0.5}, mean={"a": 1.0, "b.scale": torch.tensor([-3.0])}
    ).bind(MIXED)
    theta = torch.randn(7, dtype=torch.float64, requires_grad=True)
    value = bound.log_prob(theta)
    sd, mean = [2**-0.5] * 6 + [2**0.5], [1.0] * 6 + [-3.0]
    assert (
        abs(float(value.detach()) - stats.norm(mean, sd).logpdf(theta.detach().numpy()).sum())
        < 1e-12
    )
    (gradient,) = torch.autograd.grad(value, theta)
    assert torch.allclose(bound.gradient(theta.detach()), gradient)
    hessian = torch.autograd.functional.hessian(bound.log_prob, theta.detach())
    assert torch.allclose(torch.diag(bound.precision(theta)), -hessian)


def test_a_last_layer_interleaves_weights_and_bias():
    values = {
        "head.weight": torch.arange(6.0).reshape(2, 3),
        "head.bias": torch.tensor([10.0, 20.0]),
    }
    theta = LAYOUT.pack(values)
    assert theta.tolist() == [0, 1, 2, 10, 3, 4, 5, 20]
    assert torch.equal(LAYOUT.unpack(theta)["head.bias"], values["head.bias"].double())
    named = torch.cat([values["head.weight"].flatten(), values["head.bias"]])
    assert torch.equal(LAYOUT.from_named_order(named), theta)


def test_per_parameter_tensors_follow_the_named_order():
    flat = torch.arange(1.0, 9.0)
    by_vector = priors.Gaussian(precision=flat).bind(LAYOUT).precision(None)
    by_name = (
        priors.Gaussian(precision={"head.weight": flat[:6].reshape(2, 3), "head.bias": flat[6:]})
        .bind(LAYOUT)
        .precision(None)
    )
    assert torch.equal(by_vector, by_name)


def test_a_parameter_overrules_its_layer():
    bound = priors.Gaussian(precision={"head.bias": 5.0, "head": 1.0}).bind(LAYOUT)
    assert bound.precision(None).tolist() == [1, 1, 1, 5, 1, 1, 1, 5]


def test_flat_has_no_opinion():
    bound = priors.Flat().bind(LAYOUT)
    theta = torch.randn(8, dtype=torch.float64)
    assert float(bound.log_prob(theta)) == 0
    assert not bound.gradient(theta).any()
    assert not bound.precision(theta).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: priors.Gaussian(precision=0.0), "prior precision must be positive"),
        (lambda: priors.Gaussian(precision={"head": -1.0}), "prior precision must be positive"),
        (lambda: priors.Gaussian(mean=float("nan")), "prior mean must be finite"),
        (
            lambda: priors.Gaussian(precision={"hed": 1.0}).bind(LAYOUT),
            r"Unknown layer or parameter in the prior 'hed'. Did you mean 'head'\?",
        ),
        (
            lambda: priors.Gaussian(precision={"head.bias": 1.0}).bind(LAYOUT),
            "no value for head.weight",
        ),
        (
            lambda: priors.Gaussian(precision=torch.ones(5)).bind(LAYOUT),
            "each of the 8 free parameters.*has 5 values",
        ),
        (
            lambda: priors.Gaussian(precision={"head": torch.ones(4, 4)}).bind(LAYOUT),
            r"tensor of shape \(2, 3\)",
        ),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
