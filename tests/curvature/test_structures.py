"""Every structure against its dense twin, by one shared check; sums that merge in any order."""

import pytest
import torch

from ssla.curvature import STRUCTURES, Dense, Diagonal, Kfac, LowRank, resolve_structure
from ssla.curvature.jacobians import DenseJacobian, Features, LayerBlock, LayerJacobian, RestBlock
from support.oracles import random_spd

KINDS = {
    "features": lambda seed: Features(_randn(seed, 11, 4), 3),
    "features with bias": lambda seed: Features(_randn(seed, 11, 4), 2, bias=True),
    "features of many outputs": lambda seed: Features(_randn(seed, 11, 4), 6, bias=True),
    "dense": lambda seed: DenseJacobian(_randn(seed, 11, 2, 7)),
    "layers": lambda seed: layered(seed, places=1),
    "layers with shared weights": lambda seed: layered(seed, places=3),
}


def layered(seed, places):
    """Two layers (2×3 and 1×2) and two plain parameters, scattered over θ."""
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    blocks = (
        LayerBlock(
            order[:6].reshape(2, 3), _randn(seed, 11, places, 3), _randn(seed + 1, 11, 2, places, 2)
        ),
        LayerBlock(
            order[6:8].reshape(1, 2), _randn(seed + 2, 11, 1, 2), _randn(seed + 3, 11, 2, 1, 1)
        ),
    )
    return LayerJacobian(10, 2, 11, blocks, RestBlock(order[8:], _randn(seed + 4, 11, 2, 2)))


def _randn(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def explicit(J):
    """J as (B, C, P), from its own push: column p is J e_p."""
    eye = torch.eye(J.size, dtype=torch.float64)
    return torch.stack([J.push(eye[p]) for p in range(J.size)], -1)


@pytest.mark.parametrize("entries", [1 << 22, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_jacobian_contractions_equal_explicit_ones(kind, entries, monkeypatch):
    monkeypatch.setattr(
        "ssla.curvature.jacobians.layers.ENTRIES_AT_ONCE", entries
    )  # in one piece, and in as many as there can be
    J = KINDS[kind](0)
    A = explicit(J)
    B, C, P = A.shape
    precision, g, v = random_spd(B, C, C, seed=1), _randn(2, B, C), _randn(3, P).abs()
    W = torch.tril(_randn(4, P, P))
    assert torch.allclose(J.pull(g), torch.einsum("bcp,bc->p", A, g))
    assert torch.allclose(J.to_dense().values, A)
    many, back = _randn(5, P, 3), _randn(6, B, C, 3)
    assert torch.allclose(J.push_many(many), A @ many)
    assert torch.allclose(J.pull_many(back), torch.einsum("bcp,bck->pk", A, back))
    assert torch.allclose(J.gram(precision), torch.einsum("bcp,bcd,bdq->pq", A, precision, A))
    assert torch.allclose(J.gram_diagonal(precision), J.gram(precision).diagonal())
    assert torch.allclose(J.quadratic(W), A @ W.mT @ W @ A.mT)
    assert torch.allclose(J.quadratic_diagonal(v), A @ torch.diag(v) @ A.mT)


OUTPUTS = 10  # a product of so many is not symmetric in float32, whatever the machine


def many_outputs(kind, dtype):
    """J with ten outputs."""
    order = torch.randperm(26, generator=torch.Generator().manual_seed(0))
    places = 3 if kind == "layers with shared weights" else 1
    blocks = (
        LayerBlock(
            order[:12].reshape(3, 4),
            _randn(1, 11, places, 4).to(dtype),
            _randn(2, 11, OUTPUTS, places, 3).to(dtype),
        ),
        LayerBlock(
            order[12:22].reshape(5, 2),
            _randn(3, 11, 1, 2).to(dtype),
            _randn(4, 11, OUTPUTS, 1, 5).to(dtype),
        ),
    )
    if kind == "features":
        return Features(_randn(1, 11, 4).to(dtype), OUTPUTS, bias=True)
    J = LayerJacobian(
        26, OUTPUTS, 11, blocks, RestBlock(order[22:], _randn(5, 11, OUTPUTS, 4).to(dtype))
    )
    return J.to_dense() if kind == "dense" else J


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["features", "dense", "layers", "layers with shared weights"])
@pytest.mark.parametrize("structure", ["dense", "dual", "kfac", "diag", "low_rank"])
def test_covariances_are_symmetric_to_the_last_bit(structure, kind, dtype):
    """And as accurate as their dtype: against J H⁻¹ Jᵀ by NumPy, with H⁻¹ from the structure's
    solves.
    """
    if structure == "kfac" and kind == "dense":
        pytest.skip("kfac needs layers")
    J = many_outputs(kind, dtype)
    A = J.double().to_dense().values
    fitted = DenseJacobian(A[:1]) if structure == "dual" else J.double()
    statistics = resolve_structure("dense" if structure == "dual" else structure).zero(J.size)
    statistics = statistics.add(
        fitted, random_spd(len(A), OUTPUTS, OUTPUTS, seed=6)[: 1 if structure == "dual" else None]
    )
    operator = statistics.with_prior(torch.ones(J.size, dtype=torch.float64))
    K = operator.covariance(J)
    assert torch.equal(K, K.mT)
    inverse = operator.solve_many(torch.eye(J.size, dtype=torch.float64)).numpy()
    exact = A.numpy() @ inverse @ A.mT.numpy()
    prior_variance = float((A**2).sum(-1).max())  # the largest number that enters K
    assert abs(K.double().numpy() - exact).max() <= 10 * torch.finfo(dtype).eps * prior_variance


@pytest.mark.parametrize("at_once", [1 << 17, 1])
@pytest.mark.parametrize("kind", ["features", "features with bias", "features of many outputs"])
def test_sums_by_pairs_of_features_equal_explicit_ones(kind, at_once, monkeypatch):
    monkeypatch.setattr(
        "ssla.curvature.jacobians.features.CACHED", at_once
    )  # all rows together, and one after the other
    J = KINDS[kind](0)
    A = explicit(J)
    S, precision = (
        random_spd(J.size, J.size, seed=1),
        random_spd(len(A), J.outputs, J.outputs, seed=2),
    )
    torch.testing.assert_close(J.congruence(S), A @ S @ A.mT)
    monkeypatch.setattr(Features, "pairs_are_faster", True)
    torch.testing.assert_close(J.gram(precision), torch.einsum("bcp,bcd,bdq->pq", A, precision, A))


@pytest.mark.parametrize("least", [1.0, 1e-9], ids=["from the inverse", "from the factor"])
def test_roots_for_sums_are_those_of_the_covariance(least):
    J = Features(_randn(0, 40, 5), 6)
    operator = (
        Dense()
        .zero(J.size)
        .add(J, random_spd(40, 6, 6, seed=1))
        .with_prior(torch.ones(J.size, dtype=torch.float64))
    )
    factor = operator.factor.clone()
    factor[0, 0] *= least  # a pivot so small that H⁻¹ has large rounding errors
    operator = type(operator)(factor)
    K = operator.covariance(J)
    torch.testing.assert_close(
        operator.root_for_sums(J).values @ operator.root_for_sums(J).values.mT, K, rtol=1e-9, atol=0
    )
    torch.testing.assert_close(
        operator.variances(), torch.linalg.inv(factor).square().sum(0), rtol=1e-9, atol=0
    )


def test_features_are_phi_kron_identity():
    J = Features(_randn(0, 3, 2), 2, bias=True)
    A = explicit(J)
    row = torch.cat([J.phi[0], torch.ones(1, dtype=torch.float64)])
    assert torch.allclose(A[0], torch.block_diag(row[None], row[None]))


def kronecker_twin(J, A, precision, diagonal):
    """What kfac (expand) stands for, entry by entry with torch.kron."""
    kept = (lambda G: torch.diag(G.diagonal())) if diagonal else (lambda G: G)
    S = torch.zeros(J.size, J.size, dtype=torch.float64)
    if isinstance(J, Features):
        phi = J.with_ones()
        return torch.kron(kept(precision.sum(0)), phi.mT @ phi / len(phi))
    for block in J.layers:
        a = block.a.flatten(0, 1)
        G = torch.einsum("bcto,bcd,bdtp->op", block.delta, precision, block.delta)
        where = block.positions.flatten()
        S[where[:, None], where] = torch.kron(
            kept(G).contiguous(), (a.mT @ a / len(a)).contiguous()
        )
    where = J.rest.positions
    S[where, where] = torch.einsum("bcp,bcd,bdp->p", A[:, :, where], precision, A[:, :, where])
    return S


def check_against_dense(structure, J, precision, prior):
    """K, logdet, solves, traces, variances, response and samples of `structure` equal those of
    the matrix it stands for.
    """
    statistics = structure.zero(J.size).add(J, precision)
    A = explicit(J)
    S = torch.einsum("bcp,bcd,bdq->pq", A, precision, A)
    if isinstance(structure, Diagonal):
        S = torch.diag(S.diagonal())
    if isinstance(structure, Kfac):
        S = kronecker_twin(J, A, precision, structure.diagonal_outputs)
    H = S + torch.diag(prior)
    inverse = torch.linalg.inv(H)
    operator = statistics.with_prior(prior)
    v = _randn(9, J.size)
    assert torch.allclose(statistics.push(v), S @ v)
    assert torch.allclose(operator.covariance(J), A @ inverse @ A.mT, rtol=1e-10)
    assert torch.allclose(
        operator.sandwich_covariance(J, prior),
        A @ inverse @ torch.diag(prior) @ inverse @ A.mT,
        rtol=1e-9,
    )
    assert abs(operator.logdet() - float(torch.logdet(H))) < 1e-9
    assert torch.allclose(operator.solve(v), inverse @ v, rtol=1e-10)
    several = _randn(10, J.size, 3)
    assert torch.allclose(operator.solve_many(several), inverse @ several, rtol=1e-9)
    assert torch.allclose(operator.variances(), inverse.diagonal(), rtol=1e-10)
    other = statistics.scale_both_sides(torch.full_like(prior, 0.5)).with_prior(
        2 * prior
    )  # not of the same statistics
    assert (
        abs(
            statistics.trace(other)
            - float(torch.linalg.solve(S / 4 + 2 * torch.diag(prior), S).trace())
        )
        < 1e-9
    )
    draws = operator.sample(200_000, torch.Generator().manual_seed(0))
    assert (draws.T.cov() - inverse).abs().max() < 0.02 * inverse.abs().max()
    d = torch.full((J.size,), 0.7, dtype=torch.float64)
    scaled = statistics.scale_both_sides(d).with_prior(prior)
    assert torch.allclose(
        scaled.solve(v),
        torch.linalg.solve(torch.diag(d) @ S @ torch.diag(d) + torch.diag(prior), v),
        rtol=1e-9,
    )


DIAGONAL_FACTOR = "kfac, diagonal output factor"
EXACT = STRUCTURES | {
    "low_rank": LowRank(rank=100),
    "dense, never dual": Dense(dual=False),
    DIAGONAL_FACTOR: Kfac(output_factor="diagonal"),
}
TWINS = [
    (name, kind)
    for name in EXACT
    for kind in KINDS
    if kind != "dense" or not isinstance(EXACT[name], Kfac)
]


@pytest.mark.parametrize(("name", "kind"), TWINS)
def test_structure_equals_its_dense_twin(name, kind):
    J = KINDS[kind](5)
    prior = (
        torch.full((J.size,), 0.6, dtype=torch.float64)
        if isinstance(EXACT[name], Kfac)
        else _randn(7, J.size).abs() + 0.1
    )
    check_against_dense(EXACT[name], J, random_spd(11, J.outputs, J.outputs, seed=6), prior)


@pytest.mark.parametrize("name", EXACT)
def test_merge_is_associative_and_order_free(name):
    structure = EXACT[name]
    batches = [
        (J := KINDS["features"](s), random_spd(11, J.outputs, J.outputs, seed=s)) for s in range(3)
    ]
    one, two, three = (structure.zero(b[0].size).add(*b) for b in batches)
    direct = structure.zero(batches[0][0].size)
    for batch in batches:
        direct = direct.add(*batch)
    prior = torch.ones(batches[0][0].size, dtype=torch.float64)
    answers = [
        s.with_prior(prior).covariance(batches[0][0])
        for s in (
            direct,
            one.merge(two).merge(three),
            three.merge(two.merge(one)),
            two.merge(three).merge(one),
        )
    ]
    for answer in answers[1:]:
        assert torch.allclose(answer, answers[0], rtol=1e-12)


def test_diag_is_the_diagonal_of_dense():
    J = KINDS["dense"](1)
    precision = random_spd(11, 2, 2)
    dense = Dense().zero(J.size).add(J, precision).as_matrix()
    assert torch.allclose(Diagonal().zero(J.size).add(J, precision).diagonal, dense.diagonal())


def test_singular_curvature_names_causes_and_remedy():
    J = Features(torch.ones(5, 2, dtype=torch.float64), 1)  # two equal columns
    precision = torch.ones(5, 1, 1, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"not positive definite.*flat prior.*Remedy: give a proper prior"
    ):
        Dense().zero(2).add(J, precision).with_prior(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="not positive definite"):
        Diagonal().zero(2).with_prior(torch.zeros(2, dtype=torch.float64))


def test_different_structures_do_not_merge():
    with pytest.raises(ValueError, match="Only dense statistics of the same parameters"):
        Dense().zero(3).merge(Diagonal().zero(3))
    with pytest.raises(ValueError, match="Only kfac statistics of the same parameters"):
        Kfac().zero(3).merge(Kfac(output_factor="diagonal").zero(3))
    with pytest.raises(ValueError, match="Only diag statistics of the same parameters"):
        Diagonal().zero(3).merge(Diagonal().zero(4))


def test_unknown_structure_names_the_nearest():
    with pytest.raises(ValueError, match=r"Unknown structure 'dens'. Did you mean 'dense'\?"):
        resolve_structure("dens")
