"""Last layers of real size: few nodes in each row, factors summed once, Newton steps by
products, the default structure.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ssla
from ssla.curvature import Dense
from ssla.curvature.automatic import choose_structure, describe_time
from ssla.curvature.jacobians import Features
from ssla.curvature.structure import Extent
from ssla.fitting import passes
from ssla.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, Tempered
from ssla.likelihoods import averages as module
from ssla.likelihoods.averages import RowNodes, averages, multiply_by_curvature, pool_fisher
from ssla.maths.roots import ScaledRoot


def rows(
    n: int, classes: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, ScaledRoot]:
    """Targets, outputs and roots of n rows."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(n, classes, dtype=torch.float64, generator=generator)
    y = torch.randint(classes, (n,), generator=generator)
    basis = torch.linalg.qr(
        torch.randn(classes, classes, dtype=torch.float64, generator=generator)
    ).Q
    scale = torch.rand(n, classes, dtype=torch.float64, generator=generator)
    return y, f, ScaledRoot(scale.to(dtype), basis.to(dtype))


def head(
    n: int, width: int, classes: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A trained head on rectified features."""
    torch.manual_seed(1)
    y = torch.arange(n) % classes
    x = torch.relu(torch.randn(classes, width)[y] + 1.5 * torch.randn(n, width)).to(dtype)
    model = nn.Sequential(nn.Identity(), nn.Linear(width, classes)).to(dtype)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=25)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) + 1e-3 * (model[1].weight ** 2).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return model.eval(), x, y


class TestRowNodes:
    def test_few_rows_share_their_nodes_and_many_have_few(self) -> None:
        assert RowNodes.for_rows(1000, 10) is None
        assert RowNodes.for_rows(0, 5000) is None
        for n in (4096, 10_000, 10**6):
            nodes = RowNodes.for_rows(n, 10)
            assert nodes is not None
            assert nodes.count % 2 == 0
            assert nodes.count == max(8, 2 * math.ceil(module.NODES_OF_ALL_ROWS / n / 2))
        assert RowNodes.for_rows(500, 5000) == RowNodes(16)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize(
        "likelihood",
        [Categorical(), Categorical(temperature=2.0), Tempered(Categorical(), 0.5)],
        ids=repr,
    )
    def test_they_agree_with_shared_nodes_over_many_rows(
        self, likelihood: ssla.likelihoods.Likelihood, dtype: torch.dtype
    ) -> None:
        y, f, root = rows(6000, 5, dtype)
        pool = torch.rand(6000, dtype=torch.float64) + 0.5
        exact = averages(
            likelihood, y, f, ScaledRoot(root.scale.double(), root.basis.double()), pool=pool
        )  # type: ignore[union-attr]
        found = averages(likelihood, y, f, root, pool=pool, row_nodes=RowNodes(16))
        size = float(exact.precision.diagonal(dim1=-2, dim2=-1).mean())
        assert float((found.precision - exact.precision).abs().max()) < 5e-3 * size
        assert float(found.log_prob.sum()) == pytest.approx(float(exact.log_prob.sum()), rel=5e-3)
        torch.testing.assert_close(
            found.score.sum(0), exact.score.sum(0), atol=0.005 * 6000, rtol=0
        )
        diagonal = averages(
            likelihood, y, f, root, pool=pool, diagonal=True, row_nodes=RowNodes(16)
        ).precision
        torch.testing.assert_close(diagonal[0], found.precision[0].diagonal(), rtol=1e-5, atol=1e-4)

    def test_without_spread_they_are_the_values_at_f(self) -> None:
        y, f, root = rows(300, 4)
        found = averages(
            Categorical(),
            y,
            f,
            root.scale_by(0.0),
            pool=torch.ones(300).double(),
            row_nodes=RowNodes(8),
        )
        torch.testing.assert_close(
            found.precision, pool_fisher(Categorical(), f, torch.ones(300).double())
        )
        torch.testing.assert_close(found.log_prob, Categorical().log_prob(y, f))
        torch.testing.assert_close(found.score, Categorical().score(y, f))

    def test_they_are_the_same_in_every_pass_and_others_in_every_chunk(self) -> None:
        y, f, root = rows(50, 4)
        pool = torch.ones(50).double()
        first, again, other = (
            averages(
                Categorical(), y, f, root, pool=pool, row_nodes=RowNodes(8).for_chunk(chunk)
            ).precision
            for chunk in (3, 3, 4)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


class TestProducts:
    @pytest.mark.parametrize(
        "likelihood",
        [Categorical(), Categorical(temperature=0.7), Tempered(Categorical(), 2.0)],
        ids=repr,
    )
    def test_of_classes_are_those_of_their_matrices(
        self, likelihood: ssla.likelihoods.Likelihood
    ) -> None:
        y, f, root = rows(40, 6)
        u = torch.randn(40, 6, dtype=torch.float64)
        at_f = (likelihood.precision(y, f) @ u.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(multiply_by_curvature(likelihood, y, f, u), at_f)
        averaged = (averages(likelihood, y, f, root).precision @ u.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(multiply_by_curvature(likelihood, y, f, u, root), averaged)
        # the columns of the sum over rows, by the same nodes
        pooled = averages(
            likelihood, y, f, root, pool=torch.ones(40).double(), row_nodes=RowNodes(8)
        ).precision[0]
        for column in range(6):
            e = torch.eye(6, dtype=torch.float64)[column].expand(40, 6)
            found = multiply_by_curvature(likelihood, y, f, e, root, row_nodes=RowNodes(8)).sum(0)
            torch.testing.assert_close(found, pooled[:, column])

    def test_of_counts(self) -> None:
        y, f, u = (
            torch.tensor([1.0, 4.0]).double(),
            torch.tensor([[0.3], [1.0]]).double(),
            torch.ones(2, 1).double(),
        )
        torch.testing.assert_close(multiply_by_curvature(Poisson(), y, f, u), f.exp())


class TestKroneckerFactors:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_many_rows_give_the_gaussian_of_shared_nodes(
        self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, x, y = head(5000, 24, 6, dtype)
        options = {
            "likelihood": Categorical(),
            "structure": "kfac",
            "prior": ssla.priors.Gaussian(5.0),
            "mode": "tilt",
        }
        few = ssla.fit(model, (x, y), **options)  # type: ignore[arg-type]
        monkeypatch.setattr(module, "MANY_ROWS", 10**9)
        shared = ssla.fit(model, (x, y), **options)  # type: ignore[arg-type]
        assert few.theta.equal(shared.theta)
        variances = [
            p.marginal(x[:200]).covariance.diagonal(dim1=-2, dim2=-1) for p in (few, shared)
        ]
        torch.testing.assert_close(variances[0], variances[1], rtol=0.03, atol=0)
        p, q = (post.predict(x[:500]).probs.double() for post in (few, shared))
        assert float((q * (q.log() - p.log())).sum(1).mean()) < 1e-4
        assert few.log_evidence() == pytest.approx(shared.log_evidence(), rel=5e-3)

    def test_the_input_factor_is_summed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []
        whole = Features.second_moment

        def counted(self: Features, weights: Tensor) -> Tensor:
            calls.append(len(weights))
            return whole(self, weights)

        monkeypatch.setattr(Features, "second_moment", counted)
        model, x, y = head(300, 8, 3)
        post = ssla.fit(model, (x, y), likelihood=Categorical(), structure="kfac")
        assert post.report.rounds > 1
        assert sum(calls) == 300

    @pytest.mark.filterwarnings("ignore:The network is not at the mode")
    def test_rows_that_are_learned_by_heart_converge(self) -> None:
        """From the curvature at these outputs, which is almost zero, the first Gaussian would
        be the prior.
        """
        model, x, y = head(5000, 24, 6)
        with torch.no_grad():
            model[1].weight *= 20
        post = ssla.fit(model, (x, y), likelihood=Categorical(), structure="kfac", mode="tilt")
        assert not any("did not converge" in note for note in post.report.notes)


class TestNewtonByProducts:
    """A last layer without a dense Newton matrix: conjugate gradients reach what the matrix
    reaches.
    """

    @pytest.mark.parametrize("structure", ["kfac", "diag"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_mode(self, structure: str, dtype: torch.dtype) -> None:
        model, x, y = head(1500, 20, 4, dtype)
        prior = ssla.priors.Gaussian(2.0)
        with torch.no_grad():
            model[1].weight.mul_(0.3)
        options = {
            "likelihood": Categorical(),
            "prior": prior,
            "mode": "polish",
            "gaussian": "laplace",
        }
        exact = ssla.fit(model, (x, y), structure="dense", **options)  # type: ignore[arg-type]
        # no dense curvature beside the factors
        need = 3 * Dense(dual=False).memory(Extent(84, 4)) // 2
        found = ssla.fit(model, (x, y), structure=structure, memory_budget=need, **options)  # type: ignore[arg-type]
        off = (found.theta - exact.theta) / exact.operator.variances().sqrt()
        assert float(off.abs().max()) < 0.05
        assert found.report.steps < 15

    def test_the_variational_mean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x, y = head(5000, 24, 6)
        options = {
            "likelihood": Categorical(),
            "structure": "kfac",
            "prior": ssla.priors.Gaussian(5.0),
            "mode": "polish",
        }
        with monkeypatch.context() as shared_nodes:
            shared_nodes.setattr(module, "MANY_ROWS", 10**9)
            dense = ssla.fit(model, (x, y), **options)  # type: ignore[arg-type]
        monkeypatch.setattr(passes, "MOST_FOR_NEWTON", 0)
        found = ssla.fit(model, (x, y), **options)  # type: ignore[arg-type]
        assert not any("did not converge" in note for note in found.report.notes)
        off = (found.mean - dense.mean) / dense.covariance.variances().sqrt()
        assert float(off.square().mean().sqrt()) < 0.1
        assert found.log_evidence() == pytest.approx(dense.log_evidence(), rel=2e-3)

    def test_a_gaussian_last_layer_reaches_its_mode(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(400, 30, dtype=torch.float64)
        y = x[:, :2].sum(1) + 0.1 * torch.randn(400, dtype=torch.float64)
        model = nn.Sequential(nn.Linear(30, 1)).double().eval()
        options = {
            "likelihood": Gaussian(noise=0.1),
            "prior": ssla.priors.Gaussian(),
            "mode": "polish",
        }
        exact = ssla.fit(model, (x, y), structure="dense", **options)  # type: ignore[arg-type]
        found = ssla.fit(model, (x, y), structure="diag", memory_budget=40_000, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(found.theta, exact.theta, rtol=0, atol=1e-6)


class TestTheDefaultStructure:
    def test_a_small_problem_is_dense_and_a_large_one_has_kronecker_factors(self) -> None:
        small, large = (
            Extent(650, 10, ((65, 10),), 1500, True),
            Extent(5130, 10, ((513, 10),), 10_000, True),
        )
        assert choose_structure(small, 1 << 30).structure.name == "dense"
        choice = choose_structure(large, 1 << 30)
        assert choice.structure.name == "kfac"
        assert "dense would take about" in choice.reason
        assert choose_structure(large, 1 << 30, uneven=True).structure.name == "dense"
        assert (
            choose_structure(large, 1 << 20).structure.name == "dense"
        )  # no kfac either: refused, with what fits

    def test_a_source_of_unknown_length_counts_as_large(self) -> None:
        unknown, known = (
            Extent(1010, 10, ((101, 10),), None, True),
            Extent(1010, 10, ((101, 10),), 300, True),
        )
        assert choose_structure(unknown, 1 << 30).structure.name == "kfac"
        assert choose_structure(known, 1 << 30).structure.name == "dense"

    def test_all_weights_beyond_the_budget_are_fitted_with_kronecker_factors(self) -> None:
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 3)).eval()
        batches = [(torch.randn(40, 20), torch.arange(40) % 3)]
        prior = ssla.priors.Gaussian(100.0)
        options = {
            "likelihood": Categorical(),
            "weights": "all",
            "memory_budget": 2**27,
            "gaussian": "laplace",
        }
        post = ssla.fit(wide, batches, prior=prior, **options)  # type: ignore[arg-type]
        assert post.report.structure == "kfac"
        asked = ssla.fit(wide, batches, prior=prior, structure="kfac", **options)  # type: ignore[arg-type]
        assert torch.equal(asked.predict(batches[0][0]).probs, post.predict(batches[0][0]).probs)
        assert "chosen" not in str(asked.report)

    def test_a_precision_that_varies_inside_a_layer_is_not_given_to_kronecker_factors(self) -> None:
        model, x, y = head(200, 150, 10)
        prior = ssla.priors.Gaussian({"1.weight": 1.0, "1.bias": 2.0})
        with pytest.raises(
            ValueError, match=r"structure='dense' with 1,510 .* more than the memory budget"
        ):
            ssla.fit(model, [(x, y)], likelihood=Categorical(), prior=prior, memory_budget=2**24)

    def test_words(self) -> None:
        assert [describe_time(s) for s in (0.01, 12.4, 119, 130, 7300)] == [
            "1 s",
            "12 s",
            "119 s",
            "2 min",
            "2 h",
        ]


def test_row_covariances_by_blocks_are_those_by_a_factor() -> None:
    torch.manual_seed(0)
    J = Features(torch.randn(30, 140), 5, bias=True)
    A = torch.randn(30, 5, 5, dtype=torch.float64)
    operator = (
        Dense(dual=False)
        .zero(J.size)
        .add(J, A @ A.mT)
        .with_prior(torch.full((J.size,), 3.0, dtype=torch.float64))
    )
    assert J.blocks_are_faster
    found, expected = operator.root_for_sums(J.double()), operator.root(J.double())
    torch.testing.assert_close(
        found.values @ found.values.mT, expected.values @ expected.values.mT, rtol=1e-9, atol=1e-12
    )


def test_binary_logits_keep_their_own_nodes() -> None:
    """One output has a quadrature of its own: row nodes are for classes."""
    model, x, y = head(5000, 6, 2)
    one = nn.Sequential(nn.Identity(), nn.Linear(6, 1)).eval()
    with torch.no_grad():
        one[1].weight.copy_(model[1].weight[1:] - model[1].weight[:1])
        one[1].bias.copy_(model[1].bias[1:] - model[1].bias[:1])
    post = ssla.fit(
        one,
        (x, y.float()),
        likelihood=Bernoulli(),
        structure="kfac",
        prior=ssla.priors.Gaussian(),
        mode="tilt",
    )
    both = ssla.fit(
        model,
        (x, y),
        likelihood=Categorical(),
        structure="kfac",
        prior=ssla.priors.Gaussian(2.0),
        mode="tilt",
    )
    p, q = post.predict(x[:200]).mean.flatten(), both.predict(x[:200]).probs[:, 1]
    torch.testing.assert_close(p.double(), q.double(), rtol=0, atol=5e-3)
