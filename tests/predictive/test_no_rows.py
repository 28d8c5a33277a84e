"""No rows have an empty answer of the right shape, for every likelihood."""

import pytest
import torch

import ssla
from ssla import priors
from ssla.predictive import affine
from support.cases import CASES
from support.plain_network import X, Y, net, numbers

RUNGS = ("plug_in", "none", "newton", "output", "weights", "auto")


def targets(likelihood, outputs):
    support = likelihood.support_for(outputs)
    if support.kind == "class":
        return torch.arange(30) % support.count
    if support.kind == "vector":
        return numbers(30, outputs)
    return (torch.arange(30) % 4).double() if support.kind == "count" else Y.abs() + 0.1


def fitted(name, weights):
    likelihood, f, _ = CASES[name]
    model = net(f.shape[1])
    with torch.no_grad():
        if name in ("natural", "scaled natural", "poisson identity"):  # outputs inside their domain
            model[2].weight.mul_(0.01)
            model[2].bias.copy_(torch.tensor([0.0, -1.0] if "natural" in name else [3.0]))
    return ssla.fit(
        model,
        (X, targets(likelihood, f.shape[1])),
        likelihood=likelihood,
        prior=priors.Gaussian(),
        gaussian="laplace",
        weights=weights,
        mode="tilt",
    )


def answers(predictive, kind, outputs):
    """Everything that a predictive can be asked -> the shape of the answer, and the shape that
    it must have for no rows.
    """
    vector, probs = kind == "vector", kind == "class"
    y = torch.empty(0, outputs) if vector else torch.empty(0)
    each = (0, outputs) if vector else (0,)
    mean = tuple(predictive.probs.shape) if probs and predictive.mean.dim() == 2 else each
    for what in ("mean", "variance", "stddev", "epistemic", "aleatoric"):
        yield what, getattr(predictive, what).shape, mean
    yield "mode", predictive.mode.shape, each
    yield "mass", predictive.mass.shape, (0,)
    yield "log_prob", predictive.log_prob(y).shape, (0,)
    yield (
        "log_prob of two",
        predictive.log_prob(y.unsqueeze(1).expand(0, 2, *y.shape[1:])).shape,
        (0, 2),
    )
    yield "sample", predictive.sample(5, torch.Generator().manual_seed(0)).shape, (5, *each)
    if probs:
        yield "probs", predictive.probs.shape, (0, predictive.probs.shape[1])
        yield "interval", predictive.interval(0.9).shape, predictive.probs.shape
        yield "hdr", predictive.hdr(0.9).shape, predictive.probs.shape
        return
    yield "interval", predictive.interval(0.9).shape, (*each, 2)
    yield "icdf", predictive.icdf(0.5).shape, each
    yield "icdf of three", predictive.icdf((0.1, 0.5, 0.9)).shape, (*each, 3)
    yield "cdf", predictive.cdf(y).shape, each
    region = predictive.hdr(0.9)
    if vector:
        yield "covariance", predictive.covariance.shape, (0, outputs, outputs)
        yield "region", region.contains(y).shape, (0,)
    else:
        yield "hdr", region.lower.shape, (0, region.upper.shape[1])


@pytest.mark.parametrize("name", CASES)
def test_no_rows_have_an_empty_answer(name):
    likelihood, f, _ = CASES[name]
    outputs = f.shape[1]
    kind = likelihood.predictive.support_for(outputs).kind
    y = torch.empty(0, outputs) if kind == "vector" else torch.empty(0)
    for weights in ("last_layer", "all"):
        post = fitted(name, weights)
        mean, K = post.marginal(X[:0])
        assert mean.shape == (0, outputs)
        assert K.shape == (0, outputs, outputs)
        assert (
            ssla.ssla(post, X[:0], y).total.shape == ssla.assla(post, X[:0], y).total.shape == (0,)
        )
        for refit in RUNGS:
            if weights == "all" and kind == "vector" and refit in ("weights", "auto"):
                continue  # refused for any rows
            predictive = post.predict(X[:0], refit=refit)
            assert "0 rows" in str(predictive.diagnostics)
            assert predictive.increments(y).total.shape == (0,)
            for what, found, expected in answers(predictive, kind, outputs):
                assert tuple(found) == tuple(expected), (weights, refit, what)
    both = ssla.mixture([predictive, predictive])
    derived = (
        [both]
        if kind in ("class", "count")
        else [both, affine(predictive, 1.0, 2.0), affine(both, 1.0, 2.0)]
    )
    for part in derived:
        for what, found, expected in answers(part, kind, outputs):
            assert tuple(found) == tuple(expected), (type(part.law).__name__, what)
