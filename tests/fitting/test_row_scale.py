"""A scale of rows, chosen by rows that the network has not seen.

Oracles: a module that divides the features by hand and is fitted with the chosen setting given
explicitly; softmax by hand.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ssla
from ssla import likelihoods as L
from ssla.network import RowScale

ROWS, CLASSES, WIDTH = 600, 3, 6


class Divided(nn.Module):
    """Features and ones, divided by s, and a last layer without a bias: the same network as one
    with a scale of rows.
    """

    def __init__(self, model: nn.Sequential, scale: RowScale) -> None:
        super().__init__()
        self.body, self.scale = model[:2], scale
        self.head = nn.Linear(WIDTH + 1, CLASSES, bias=False).to(model[2].weight)
        with torch.no_grad():
            self.head.weight.copy_(torch.cat([model[2].weight, model[2].bias[:, None]], 1))

    def features(self, x: Tensor) -> Tensor:
        phi = self.body(x)
        h = (phi**2).sum(1, keepdim=True).clamp(min=self.scale.least) / self.scale.mean
        s = torch.sqrt((1 + self.scale.strength * h) / (1 + self.scale.strength))
        return torch.cat([phi, torch.ones_like(s)], 1) / s

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Problem(NamedTuple):
    model: nn.Sequential
    train: tuple[Tensor, Tensor]
    unseen: tuple[Tensor, Tensor]
    x: Tensor  # of other rows


def problem(normalised: bool, dtype: torch.dtype = torch.float64) -> Problem:
    """Targets of a network whose logits depend on the direction of the features alone, or on
    the features themselves.
    """
    generator = torch.Generator().manual_seed(5)
    model = (
        nn.Sequential(nn.Linear(4, WIDTH), nn.Identity(), nn.Linear(WIDTH, CLASSES)).double().eval()
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        model[0].bias.zero_()
        x = torch.randn(3 * ROWS, 4, generator=generator, dtype=torch.float64)
        x *= torch.exp(0.7 * torch.randn(3 * ROWS, 1, generator=generator, dtype=torch.float64))
        phi = model[0](x)
        f = (
            model[2](phi)
            if not normalised
            else 8 * phi / phi.norm(dim=1, keepdim=True) @ model[2].weight.mT / 3
        )
        y = L.Categorical().sample(f, 1, generator)[0]
    parts = [
        (x[i * ROWS : (i + 1) * ROWS].to(dtype), y[i * ROWS : (i + 1) * ROWS]) for i in range(2)
    ]
    return Problem(model.to(dtype), *parts, x[2 * ROWS :].to(dtype))


def fitted(given: Problem, **options: object) -> ssla.Posterior:
    asked = {"likelihood": L.Categorical(), "validation": given.unseen, "mode": "tilt"} | options
    return ssla.fit(given.model, given.train, **asked)


def scale_of(posterior: ssla.Posterior) -> RowScale | None:
    return posterior.network.row_scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("structure", ["dense", "kfac"])
def test_the_posterior_is_that_of_a_network_with_divided_features(
    structure: str, dtype: torch.dtype
) -> None:
    given = problem(True, dtype)
    # of float32 with a prior, because the weakest one leaves float32 few digits
    asked = {} if dtype == torch.float64 else {"prior": ssla.priors.Gaussian(0.3)}
    posterior = fitted(given, structure=structure, gaussian="laplace", **asked)
    scale = scale_of(posterior)
    assert scale is not None
    assert posterior.report.validation.row_scales is not None
    assert "length of the features" in str(posterior.report)
    by_hand = Divided(given.model, scale).eval()
    prior = ssla.priors.Gaussian(float(posterior.bound_prior.precision(posterior.theta)[0]))
    same = ssla.fit(
        by_hand,
        given.train,
        likelihood=posterior.likelihood,
        prior=prior,
        structure=structure,
        mode="tilt",
        gaussian="laplace",
    )
    tolerance = {"rtol": 0, "atol": 1e-9 if dtype == torch.float64 else 1e-4}
    torch.testing.assert_close(
        posterior.predict(given.x).probs, same.predict(given.x).probs, **tolerance
    )
    with torch.no_grad():
        plug_in = (by_hand(given.x) / posterior.likelihood.temperature).softmax(1)
    torch.testing.assert_close(
        posterior.predict(given.x, refit="plug_in").probs, plug_in, **tolerance
    )


def test_it_is_worth_having_and_the_report_says_so() -> None:
    given = problem(True)
    found = fitted(given).report.validation
    assert found.predictive < found.scaled_plug_in - 0.02
    low, high = found.row_scales
    assert low < 0.8 < 1.2 < high


@pytest.mark.parametrize("likelihood", [L.Categorical(), L.Categorical(temperature=2.0)], ids=str)
def test_a_network_that_is_right_keeps_its_logits(likelihood: L.Categorical) -> None:
    """Also where all of them are too large by one factor."""
    posterior = fitted(problem(False), likelihood=likelihood)
    assert scale_of(posterior) is None
    assert posterior.report.validation.row_scales is None


def test_short_features_are_not_made_confident() -> None:
    scale = RowScale(30.0, mean=4.0, least=1.0)
    squares = torch.tensor([0.0, 0.5, 1.0, 4.0, 400.0], dtype=torch.float64)
    s = scale.compute_scales(squares)
    assert s[0] == s[1] == s[2]
    assert float(s[3]) == pytest.approx(1.0)
    assert float(s[4]) == pytest.approx((3001 / 31) ** 0.5)


def test_files_updates_and_other_priors_keep_it(tmp_path: Path) -> None:
    given = problem(True)
    posterior = fitted(given, gaussian="laplace")
    scale = scale_of(posterior)
    loaded = ssla.load(posterior.save(tmp_path / "p"), given.model)
    assert scale_of(loaded) == scale
    torch.testing.assert_close(
        loaded.predict(given.x).probs, posterior.predict(given.x).probs, rtol=0, atol=0
    )
    for other in (posterior.update(given.unseen), posterior.with_prior(ssla.priors.Gaussian(3.0))):
        assert scale_of(other) == scale
    options = {"prior": posterior.prior, "mode": "tilt", "gaussian": "laplace"}
    plain = ssla.fit(given.model, given.train, likelihood=posterior.likelihood, **options)
    with pytest.raises(ValueError, match="scales of rows"):
        posterior.merge(plain)


def test_exported_graphs_have_it(tmp_path: Path) -> None:
    given = problem(True, torch.float32)
    posterior = fitted(given, prior=ssla.priors.Gaussian(0.3))
    assert scale_of(posterior) is not None
    posterior.export(tmp_path / "model.pt2", example=given.x[:50])
    graph = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(
        graph(given.x[50:60])[0],
        posterior.predict(given.x[50:60]).probs.double(),
        rtol=0,
        atol=1e-5,
    )


def test_workers_find_the_same() -> None:
    given = problem(True)
    x, y = given.train
    shards = [(x[:250], y[:250]), (x[250:], y[250:])]
    options = {
        "likelihood": L.Categorical(),
        "validation": given.unseen,
        "mode": "tilt",
        "gaussian": "laplace",
    }
    with ThreadPoolExecutor(2) as pool:
        spread = ssla.distributed.fit(given.model, shards, client=pool, **options)
    alone = ssla.fit(given.model, given.train, **options)
    assert scale_of(spread) == scale_of(alone) is not None
    torch.testing.assert_close(
        spread.predict(given.x).probs, alone.predict(given.x).probs, rtol=0, atol=1e-8
    )
