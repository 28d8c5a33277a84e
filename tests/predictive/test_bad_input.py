"""Questions to a predictive that are refused, and the remedy."""

import pytest
import torch

import ssla
from support.bad_input import X, Y, assert_message, fit, net

CASES = {
    "level in percent": (
        lambda: fit().predict(X).interval(95),
        "level must be strictly between 0 and 1, but is 95. For 95% write 0.95",
    ),
    "quantile above one": (lambda: fit().predict(X).icdf(1.5), "probabilities between 0 and 1"),
    "y of another length": (
        lambda: fit().predict(X).log_prob(Y[:7]),
        r"y must be a number, \(20,\)",
    ),
    "vector target on a network": (
        lambda: fit(net(outputs=2), (X, torch.stack([Y, Y], 1)), weights="all").predict(
            X, refit="weights"
        ),
        r"no closed form for a vector target.*ssla.ssla\(posterior, x, y\)",
    ),
    "predict without a posterior": (
        lambda: ssla.predictive.predict(net(), X),
        "needs a Posterior, as ssla.fit returns it",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    assert_message(*CASES[case])
