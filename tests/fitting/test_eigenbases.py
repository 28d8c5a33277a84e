"""Bases in which the curvature is diagonal: rotated, restored, and against the matrix itself."""

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.curvature import LowRank
from ssla.fitting.evidence import eigenbasis, make_thin_basis
from support.networks import data, mlp

X, Y = data(60)


def curvature(structure, rows=60):
    post = ssla.fit(
        mlp(),
        (X[:rows], Y[:rows]),
        likelihood=L.Gaussian(noise=0.3),
        prior=priors.Gaussian(),
        weights="all",
        structure=structure,
        mode="as_is",
    )
    return post.statistics.curvature, post.theta.numel()


def vectors(size):
    return torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("structure", ["dense", "kfac", "diag"])
def test_a_basis_is_orthogonal_and_makes_the_curvature_diagonal(structure):
    S, size = curvature(structure)
    basis = eigenbasis(S, torch.ones(size).double(), torch.zeros(size, dtype=torch.long))
    v = vectors(size)
    there = basis.to_eigenbasis(v)
    assert torch.allclose(basis.from_eigenbasis(there), v, atol=1e-12)
    assert torch.allclose(there @ there.mT, v @ v.mT, atol=1e-12)
    pushed = torch.stack([S.push(one) for one in v])
    scale = float(pushed.abs().max())
    assert torch.allclose(basis.from_eigenbasis(basis.values * there), pushed, atol=1e-10 * scale)


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("structure", ["dense", "kfac"])
def test_precisions_that_differ_inside_a_block_have_no_basis(structure):
    S, size = curvature(structure)
    pattern = torch.ones(size).double()
    pattern[0] = 2.0
    groups = torch.zeros(size, dtype=torch.long)
    assert eigenbasis(S, pattern, groups) is None
    assert eigenbasis(S, pattern / pattern, groups.index_fill(0, torch.tensor([0]), 1)) is None


@pytest.mark.filterwarnings("ignore:The network is")
@pytest.mark.parametrize("structure", ["dense", LowRank(rank=5)])
def test_fewer_directions_than_parameters(structure):
    S, size = curvature(structure, rows=10)
    basis = make_thin_basis(S, size)
    assert basis.directions.shape[1] < size
    v = vectors(size)
    there = basis.to_eigenbasis(v)
    assert torch.allclose(basis.from_eigenbasis(there), v, atol=1e-12)
    assert torch.allclose(there @ there.mT, v @ v.mT, atol=1e-10)
    pushed = torch.stack([S.push(one) for one in v])
    scale = float(pushed.abs().max())
    assert torch.allclose(basis.from_eigenbasis(basis.values * there), pushed, atol=1e-8 * scale)
    assert make_thin_basis(curvature("diag")[0], size) is None
