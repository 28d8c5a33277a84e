"""Arguments of `ssla.fit` and `ssla.ssla` that are refused; nothing is changed by an error."""

import math

import pytest
import torch

import ssla
from ssla import likelihoods as L
from support.bad_input import X, Y, assert_message, fit, net, spoiled

CASES = {
    "unknown mode": (
        lambda: fit(mode="polisch"),
        r"Unknown mode 'polisch'. Did you mean 'polish'\?",
    ),
    "likelihood by name": (
        lambda: fit(likelihood="gaussian"),
        "must be an object such as ssla.likelihoods.Gaussian",
    ),
    "tempered estimate": (
        lambda: fit(likelihood=L.Tempered(L.Gaussian(noise="estimate"), 0.5)),
        "give the base's noise as a number",
    ),
    "a likelihood's class": (
        lambda: fit(likelihood=L.Poisson),
        r"is the class Poisson. Write Poisson\(",
    ),
    "budget in words": (
        lambda: fit(memory_budget="1GB"),
        "memory_budget must be a number of bytes",
    ),
    "weights as a number": (lambda: fit(weights=3), "weights must be 'last_layer', 'all', a mod"),
    "no budget": (lambda: fit(memory_budget=0), "memory_budget must be a number of bytes"),
    "ssla of a model": (lambda: ssla.ssla(net(), X, Y), "first argument must be a Posterior"),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    assert_message(*CASES[case])


def test_an_error_in_the_middle_leaves_the_module_alone():
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="y must be finite"):
        fit(model, [(X, Y), (X, spoiled(Y, 0, math.nan))])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_interrupt_passes_through_and_leaves_the_module_alone():
    def batches():
        yield X, Y
        raise KeyboardInterrupt

    model = net()
    keys = {name: set(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches())
    assert keys == {name: set(vars(m)) for name, m in model.named_modules()}
