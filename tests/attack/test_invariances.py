"""What must hold for every likelihood, structure, choice of weights, Gaussian and dtype, in pairs.

Nothing here knows a likelihood by name: all come from `support.cases`, which must have every class
of `ssla.likelihoods`. A new likelihood is attacked as soon as it is there. The oracles are the same
fit of the same rows told in another way, sums and integrals of the density, and the fit of all
rows.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ssla
from ssla import likelihoods as L
from ssla.likelihoods import Likelihood
from support.cases import CASES

STRUCTURES = ("dense", "kfac", "diag", "low_rank")
SCOPES = ("last_layer", "all")
ROWS = 16
PRIOR = ssla.priors.Gaussian(2.0)
DISCRETE = ("count", "class")

Case = tuple[str, str, str, str, torch.dtype]


def cases() -> list[Case]:
    """Every likelihood × structure. Scope, Gaussian and dtype take turns, so that each pair of two
    settings is met (see test_every_pair_of_settings_is_met).
    """
    chosen: list[Case] = []
    for i, name in enumerate(CASES):
        for j, structure in enumerate(STRUCTURES):
            scope = SCOPES[(i + j) % 2]
            gaussian = ("variational", "laplace")[(i + j // 2) % 2]
            dtype = (torch.float32, torch.float64)[(i // 2 + j) % 2]
            if not CASES[name][0].linear_domain:
                gaussian = "laplace"
            chosen.append((name, structure, scope, gaussian, dtype))
    return chosen


class Problem(NamedTuple):
    model: nn.Sequential
    x: Tensor
    y: Tensor
    likelihood: Likelihood


def problem(name: str, dtype: torch.dtype) -> Problem:
    """A network whose outputs stay near a place where the likelihood is at home, and rows that
    follow it.
    """
    likelihood, places, targets = CASES[name]
    place = places[int(places.abs().amax(1).argmin())]
    if not likelihood.linear_domain:
        place = places[int(places.abs().amin(1).argmax())]
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, len(place))).to(dtype)
    with torch.no_grad():
        model[2].weight.mul_(0.3 * place.abs().clamp(0.3, 1.0)[:, None].to(dtype))
        model[2].bias.copy_(place)
    x = torch.randn(ROWS, 2, generator=generator).to(dtype)
    f = model(x).detach().double()
    try:
        y = likelihood.sample(f, 1, generator)[0]
    except (NotImplementedError, AttributeError, ValueError):  # a log density without a sampler
        y = targets[torch.randint(len(targets), (ROWS,), generator=generator)]
    y = y.reshape(ROWS, *targets.shape[1:])
    return Problem(model.eval(), x, y, likelihood)


def fit(task: Problem, case: Case, *data: Tensor, **options: Any) -> ssla.Posterior:
    _, structure, scope, gaussian, _ = case
    # The same directions for all rows and for parts of them, so that posteriors can be compared and
    # merged.
    kind = ssla.structures.LowRank(rank=40) if structure == "low_rank" else structure
    chosen = {
        "prior": PRIOR,
        "weights": scope,
        "structure": kind,
        "mode": "tilt",
        "gaussian": gaussian,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The network is not at the mode")
        warnings.filterwarnings("ignore", "The residuals are")
        source = options.pop("source", data)
        return ssla.fit(task.model, source, likelihood=task.likelihood, **(chosen | options))


def close(found: ssla.Posterior, expected: ssla.Posterior, x: Tensor, accuracy: float) -> None:
    """Means in units of the standard deviation, covariances relative to it."""
    ours, theirs = found.marginal(x), expected.marginal(x)
    scale = theirs.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert float(((ours.mean - theirs.mean) / scale).abs().max()) < accuracy
    relative = (ours.covariance - theirs.covariance) / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    assert float(relative.abs().max()) < accuracy


def test_every_likelihood_is_attacked() -> None:
    public = {
        name
        for name, value in vars(L).items()
        if inspect.isclass(value) and hasattr(value, "fisher")
    }
    public -= {"Likelihood"}  # the protocol
    met = {type(case[0]).__name__ for case in CASES.values()}
    assert public <= met


def test_every_pair_of_settings_is_met() -> None:
    """The variational Gaussian is not for likelihoods with a restricted domain."""
    values = [sorted({str(case[k]) for case in cases()}) for k in range(5)]
    for first, second in itertools.combinations(range(5), 2):
        met = {(str(case[first]), str(case[second])) for case in cases()}
        missing = set(itertools.product(values[first], values[second])) - met
        if (first, second) == (0, 3):
            missing = {pair for pair in missing if CASES[pair[0]][0].linear_domain}
        assert not missing


@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case)))
class TestFit:
    def test_order_batches_and_repeated_rows_do_not_matter(self, case: Case) -> None:
        """A third of the rows counts twice: by a weight in one fit, as repeated rows in other
        batches in the other.
        """
        task = problem(case[0], case[4])
        before = {name: value.clone() for name, value in task.model.state_dict().items()}
        weights = torch.ones(ROWS)
        weights[::3] = 2.0
        order = torch.randperm(ROWS + len(weights[::3]), generator=torch.Generator().manual_seed(1))
        index = torch.cat([torch.arange(ROWS), torch.arange(ROWS)[::3]])[order]
        batches = [(task.x[part], task.y[part]) for part in index.split(5)]
        weighted = fit(task, case, task.x, task.y, weights)
        repeated = fit(task, case, source=batches)
        accuracy = 1e-3 if case[4] == torch.float32 else 1e-6
        if case[1] == "low_rank":
            accuracy = max(accuracy, 1e-5)
        close(weighted, repeated, task.x, accuracy)
        assert weighted.log_evidence() == pytest.approx(repeated.log_evidence(), rel=1e-4, abs=1e-4)
        for name, value in task.model.state_dict().items():
            assert torch.equal(value, before[name])

    def test_the_gaussian_has_not_run_away(self, case: Case) -> None:
        task = problem(case[0], case[4])
        post = fit(task, case, task.x, task.y)
        off = post.mean - post.theta
        assert float((off.abs() / post.covariance.variances().sqrt()).max()) < 10
        variances = post.covariance.variances()
        assert bool((variances > 0).all())
        assert (
            float((variances * 2.0).max()) < 1.5
        )  # the data do not add to the prior's variance of 1/2
        values = task.likelihood.log_prob(task.y, post.marginal(task.x).mean.double())
        assert bool(torch.isfinite(values).all())
        kind = task.likelihood.support_for(post.network.outputs).kind
        if post.gaussian == "variational" and kind in DISCRETE:
            assert post.log_evidence() <= 0  # a bound of a log probability

    def test_the_predictive_is_a_distribution(self, case: Case) -> None:
        task = problem(case[0], case[4])
        found = fit(task, case, task.x, task.y).predict(task.x[:3])
        assert bool(torch.isfinite(found.log_prob(task.y[:3])).all())
        if hasattr(found, "probs"):
            torch.testing.assert_close(
                found.probs.sum(1).double(), torch.ones(3).double(), rtol=0, atol=2e-6
            )
            assert bool((found.probs >= 0).all())
            return
        if found.mean.dim() > 1:
            return
        levels = torch.tensor([0.05, 0.3, 0.5, 0.9])
        quantiles = found.icdf(levels)
        assert bool((quantiles.diff(dim=1) >= 0).all())
        if task.likelihood.support_for(task.model[2].out_features).kind in DISCRETE:
            counts = torch.arange(0.0, 4000.0).expand(3, -1)
            total = found.log_prob(counts).double().exp().sum(1)
            torch.testing.assert_close(total, torch.ones(3).double(), rtol=0, atol=1e-4)
            assert bool((found.cdf(quantiles) >= levels - 1e-5).all())
            return
        torch.testing.assert_close(
            found.cdf(quantiles), levels.expand(3, -1).to(quantiles.dtype), rtol=0, atol=1e-4
        )
        low, high = found.icdf(torch.tensor([1e-4, 1 - 1e-4])).double().unbind(1)
        grid = low[:, None] + torch.linspace(0, 1, 4001).double() * (high - low)[:, None]
        mass = torch.trapezoid(found.log_prob(grid.to(quantiles.dtype)).double().exp(), grid, dim=1)
        torch.testing.assert_close(mass, torch.full((3,), 1 - 2e-4).double(), rtol=0, atol=2e-3)

    def test_more_rows_are_as_a_fit_of_all(self, case: Case) -> None:
        task = problem(case[0], case[4])
        a, b = slice(0, ROWS // 2), slice(ROWS // 2, ROWS)
        one, other = (fit(task, case, task.x[r], task.y[r]) for r in (a, b))
        whole = fit(task, case, task.x, task.y)
        both, turned = one.merge(other), other.merge(one)
        close(both, turned, task.x, 1e-6 if case[4] == torch.float64 else 1e-4)
        updated = one.update((task.x[b], task.y[b]))
        for found in (both, updated):
            assert found.report.n == ROWS
            ratio = found.covariance.variances() / whole.covariance.variances()
            assert float(ratio.min()) > 0.5
            assert float(ratio.max()) < 2.0
            f, K = whole.marginal(task.x)
            off = (found.marginal(task.x).mean - f).abs() / K.diagonal(dim1=-2, dim2=-1).sqrt()
            assert float(off.max()) < 1e-3  # tilted: the mean is the network's

    def test_a_file_answers_the_same(self, case: Case, tmp_path: Path) -> None:
        task = problem(case[0], case[4])
        post = fit(task, case, task.x, task.y)
        post.save(tmp_path / "post")
        # code is not stored
        own = task.likelihood if isinstance(task.likelihood, L.Custom) else None
        loaded = ssla.load(tmp_path / "post", task.model, likelihood=own)
        y = task.y[:3]
        assert torch.equal(
            loaded.predict(task.x[:3]).log_prob(y), post.predict(task.x[:3]).log_prob(y)
        )
        assert math.isclose(loaded.log_evidence(), post.log_evidence(), rel_tol=1e-12)
