"""Roots of K: R Rᵀ is the covariance, for every structure and kind of Jacobian."""

import pytest
import torch

from ssla.curvature import resolve_structure
from ssla.curvature.jacobians import DenseJacobian, Features
from ssla.maths.roots import ScaledRoot, full_root

C, F, B = 5, 4, 7


def jacobian(dtype=torch.float64, bias=False):
    return Features(
        torch.randn(
            B, F - bias, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        ).to(dtype),
        C,
        bias,
    )


def operator(name, J):
    p = torch.softmax(
        torch.randn(B, C, generator=torch.Generator().manual_seed(2), dtype=torch.float64), 1
    )
    structure = (
        resolve_structure(name)
        .zero(J.size)
        .add(J.double(), torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2))
    )
    return structure.with_prior(torch.full((J.size,), 0.7, dtype=torch.float64))


@pytest.mark.parametrize("name", ["dense", "kfac", "diag", "low_rank"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_root_of_a_last_layer_is_that_of_its_covariance(name, bias, dtype):
    J = jacobian(dtype, bias)
    H = operator(name, jacobian(bias=bias))
    root, K = H.root(J), H.covariance(J).double()
    eps = 1e-12 if dtype == torch.float64 else 2e-6
    R = root.multiply(torch.eye(C, dtype=root.dtype)).double()
    assert (R @ R.mT - K).abs().max() < eps
    assert (root.variances().double() - K.diagonal(dim1=1, dim2=2)).abs().max() < eps
    part = slice(2, 5)
    assert (
        root.select_rows(part).multiply(torch.eye(C, dtype=root.dtype)).double() - R[part]
    ).abs().max() < eps
    # these form nothing of size (B, C, C)
    assert isinstance(root, ScaledRoot) == (name in ("kfac", "diag"))


@pytest.mark.parametrize("name", ["dense", "diag"])
def test_root_of_other_jacobians(name):
    J = DenseJacobian(jacobian().to_dense().values)
    H = operator(name, J)
    R = H.root(J).multiply(torch.eye(C, dtype=torch.float64))
    assert (R @ R.mT - H.covariance(J)).abs().max() < 1e-12


def test_singular_covariances_have_roots():
    A = torch.randn(3, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    K = A @ A.mT
    K[1] = 0
    K[2] += torch.eye(6, dtype=torch.float64)
    R = full_root(K).values
    assert (R @ R.mT - K).abs().max() < 1e-12
    assert not R[1].any()
