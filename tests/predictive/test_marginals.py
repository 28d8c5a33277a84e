"""Marginals from elsewhere: what is no covariance is refused, rounding is not."""

import pytest
import torch

from ssla import likelihoods as L
from ssla.predictive import from_marginal

GAUSSIAN = L.Gaussian(noise=0.3)


@pytest.mark.parametrize(
    ("K", "message"),
    [
        (
            [[[-0.5]], [[1.0]]],
            r"positive semi-definite .* 1 of 2 are not \(row 0: its smallest eigenvalue is -0.5",
        ),
        ([[[1.0]], [[-1e-3]]], r"positive semi-definite .*row 1"),
        ([[[1.0, 2.0], [2.0, 1.0]]], "positive semi-definite .* eigenvalue is -1"),
        ([[[1.0, 0.5], [-0.2, 1.0]]], "symmetric .* transpose by 0.7"),
        ([[[float("nan")]]], "must be finite"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_no_covariance_is_refused(K, message, dtype):
    K = torch.tensor(K, dtype=dtype)
    noise = L.Gaussian(noise=torch.ones(K.shape[-1]))
    with pytest.raises(ValueError, match=message):
        from_marginal(noise, torch.zeros(K.shape[:2], dtype=dtype), K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_covariances_that_are_only_rounded_pass(dtype):
    """Singular ones too, in any unit: J Jᵀ of fewer directions than outputs, rounded to the
    dtype.
    """
    J = (
        torch.randn(50, 5, 2, dtype=torch.float64)
        * torch.logspace(-6, 6, 50, dtype=torch.float64)[:, None, None]
    )
    K = (J @ J.mT).to(dtype)
    found = from_marginal(L.Gaussian(noise=torch.ones(5)), torch.zeros(50, 5, dtype=dtype), K)
    assert torch.isfinite(found.log_prob(torch.zeros(50, 5))).all()
    variances = torch.tensor(
        [[[1.0]], [[-1e-17]]], dtype=torch.float64
    )  # 1 − (1 + ε) in a Gaussian process, say
    assert from_marginal(GAUSSIAN, torch.zeros(2, 1).double(), variances).epistemic[1] == 0
