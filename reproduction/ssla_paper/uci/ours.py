"""One split of one set, each method with scalers of the training rows alone, scored on all test
rows.

Scores are in the unit of the published table, the target's standard deviation over all rows; no
method uses that number. Seconds are of the processor, of one thread: training, noise, curvature and
tuning, and prediction for all test rows.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ssla.likelihoods import Gaussian, Likelihood
from ssla.refit import WeightRefit
from ssla.sklearn import SSLARegressor
from ssla.tables.networks import Ensemble
from ssla.tables.networks.held_out_noise import NODES
from ssla_paper.networks import EPOCHS, Recipe, perceptron, squared_error, train
from ssla_paper.peers import GaussianMixture, MissingPeerError, scores
from ssla_paper.peers.bayesian_layers import layered_mean_field
from ssla_paper.peers.conformal import interval_scores, split_conformal
from ssla_paper.peers.dropout import mc_dropout
from ssla_paper.peers.laplace import laplace
from ssla_paper.runner import Record
from ssla_paper.uci.data import load, split

LEVELS = (0.95, 0.75, 0.5)
REFITTED = 100  # test rows with real refits of the weights, to compare with the closed form
FEWEST = 20  # rows for an interval of 95%
TIMES = tuple(
    round(6 * share) for _, share in NODES
)  # 4, 1, 1: the shares of the noise as repetitions


@dataclass(frozen=True, eq=False)
class Case:
    """One split: x and y in their own units, and how to score."""

    x: np.ndarray
    y: np.ndarray
    new: np.ndarray
    target: np.ndarray
    unit: float
    seed: int

    @staticmethod
    def of(name: str, seed: int) -> Case:
        rows = load(name)
        parts = split(len(rows.y), seed)
        return Case(
            rows.x[parts.train],
            rows.y[parts.train],
            rows.x[parts.test],
            rows.y[parts.test],
            rows.unit,
            seed,
        )

    def scored(self, answer: Any, seconds: float) -> Record:
        """The scores of an answer in y's own unit."""
        found = scores(answer, torch.from_numpy(self.target), LEVELS)
        return {**in_unit(found, self.unit), "cost": seconds}

    def standardised(self) -> tuple[Tensor, Tensor, Tensor, float, float]:
        """x, y and new rows by the training rows' means and deviations, and y's two."""
        mean, sd = self.x.mean(0), self.x.std(0)
        sd = np.where(sd > 1e-12, sd, 1.0)
        shift, scale = float(self.y.mean()), float(self.y.std())
        x, new = (torch.from_numpy((part - mean) / sd) for part in (self.x, self.new))
        return x, torch.from_numpy((self.y - shift) / scale), new, shift, scale


def in_unit(found: dict[str, float], unit: float) -> dict[str, float]:
    """Scores of y as scores of y/unit."""
    length = ("crps", "rmse", "width")
    moved = {
        name: value / unit if name.startswith(length) else value for name, value in found.items()
    }
    return moved | ({"nll": found["nll"] - math.log(unit)} if "nll" in found else {})


def _clocked(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    found = work()
    return found, time.process_time() - start


def own(name: str, seed: int, epochs: int = 200) -> Record:
    """Our pipelines of one and of five networks, and other methods on the same networks."""
    case = Case.of(name, seed)
    methods: Record = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shared: dict[str, Any] = {
            "likelihood": "gaussian",
            "activation": "silu",
            "max_epochs": epochs,
            "random_state": seed,
        }
        one, fit_one = _clocked(lambda: SSLARegressor(members=1, **shared).fit(case.x, case.y))
        five, fit_five = _clocked(lambda: SSLARegressor(members=5, **shared).fit(case.x, case.y))
    for label, model, cost in (("", one, fit_one), (" x5", five, fit_five)):
        for rung in ("output", "weights", "none"):
            answer, answering = _clocked(
                partial(model.ensemble_.predict, torch.from_numpy(case.new), rung)
            )
            methods[rung + label] = case.scored(answer, cost + answering)
    training_noise, held_out_noise = (
        networks(one.ensemble_, case, own_noise) for own_noise in (True, False)
    )
    methods["plug-in"] = case.scored(training_noise, fit_one)
    methods["plug-in, noise"] = case.scored(held_out_noise, fit_one)
    methods["ensemble"] = case.scored(networks(five.ensemble_, case, True), fit_five)
    methods["ensemble, noise"] = case.scored(networks(five.ensemble_, case, False), fit_five)
    for label, answered in (
        ("LA", lambda: classical(one.ensemble_, case)),
        ("LA, noise", lambda: fair(one.ensemble_, case, polished=False)),
        ("LA, polished", lambda: fair(one.ensemble_, case, polished=True)),
    ):
        try:
            answer, seconds = _clocked(answered)
            methods[label] = case.scored(answer, fit_one + seconds)
        except MissingPeerError as error:
            methods[label] = {"missing": str(error)}
    gap, seconds = _clocked(lambda: refit_gap(one.ensemble_, case))
    return {
        "set": name,
        "split": seed,
        "methods": methods,
        "refit_gap": gap,
        "refit_seconds": seconds,
        "warnings": [str(w.message) for w in said],
    }


def refit_gap(ensemble: Ensemble, case: Case) -> float:
    """Largest difference of log density between the output refit and real refits of the last
    layer on all rows and (x, y).
    """
    assert ensemble.target is not None
    z = ensemble.inputs(torch.from_numpy(case.new[:REFITTED]))
    y = ensemble.target(torch.from_numpy(case.target[:REFITTED])[:, None])[:, 0]
    posterior = ensemble.components[0].posterior
    refits = WeightRefit(on_failure="raise")(posterior, z)
    return float((refits.density_at(y).log - posterior.predict(z).log_prob(y)).abs().max())


def networks(ensemble: Ensemble, case: Case, own_noise: bool) -> GaussianMixture:
    """The networks as they were trained, each with the noise of its training residuals or that
    from held-out rows.
    """
    assert ensemble.target is not None
    z, new = (ensemble.inputs(torch.from_numpy(part)) for part in (case.x, case.new))
    target = ensemble.target(torch.from_numpy(case.y)[:, None])
    means, sds = [], []
    for m, module in enumerate(ensemble.modules):
        with torch.no_grad():
            f, residual = module(new)[:, 0], target - module(z)
        noises = [float(residual.square().mean().sqrt())] if own_noise else noise_nodes(ensemble, m)
        means += [f] * len(noises)
        sds += [torch.full_like(f, noise) for noise in noises]
    return _in_unit_of(ensemble, GaussianMixture(torch.stack(means), torch.stack(sds)))


def classical(ensemble: Ensemble, case: Case) -> GaussianMixture:
    """laplace-torch on the last layer of the same network as it was trained, noise and prior by
    its evidence.
    """
    return _in_unit_of(ensemble, _laplace(ensemble, case, ensemble.modules[0], None))


def fair(ensemble: Ensemble, case: Case, polished: bool) -> GaussianMixture:
    """The same with our noise from held-out rows, at its three values, and the prior by its
    evidence.

    polished: at the mode of the last layer on all rows, like our posteriors, and not at the trained
    weights.
    """
    parts = {}
    for component in ensemble.components:
        if component.member == 0:
            noise = _noise(component.posterior.likelihood)
            module = (
                with_last_layer(ensemble.modules[0], component.posterior.theta)
                if polished
                else ensemble.modules[0]
            )
            parts[noise] = _laplace(ensemble, case, module, noise)
    noises = noise_nodes(ensemble, 0)
    means, sds = (
        torch.cat([getattr(parts[noise], what) for noise in noises]) for what in ("means", "sds")
    )
    return _in_unit_of(ensemble, GaussianMixture(means, sds))


def with_last_layer(module: nn.Sequential, theta: Tensor) -> nn.Sequential:
    """The network with θ = (weight, bias) in its last layer; the module itself is not changed."""
    net = copy.deepcopy(module).double()
    last = net[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.copy_(theta[: last.weight.numel()].reshape(last.weight.shape))
        last.bias.copy_(theta[last.weight.numel() :])
    return net


def _laplace(
    ensemble: Ensemble, case: Case, module: nn.Module, noise: float | None
) -> GaussianMixture:
    assert ensemble.target is not None
    z, new = (ensemble.inputs(torch.from_numpy(part)) for part in (case.x, case.new))
    y = ensemble.target(torch.from_numpy(case.y)[:, None])[:, 0]
    return laplace(module, z, y, new, structure="full", noise=noise, fit_prior=noise is not None)


def _noise(law: Likelihood) -> float:
    assert isinstance(law, Gaussian)
    return float(torch.as_tensor(law.noise))


def noise_nodes(ensemble: Ensemble, member: int) -> list[float]:
    """The member's values of σ, each repeated by its share."""
    found: list[float] = []
    laws = [c.posterior.likelihood for c in ensemble.components if c.member == member]
    for law, count in zip(laws, TIMES, strict=True):
        found += [_noise(law)] * count
    return found


def _in_unit_of(ensemble: Ensemble, answer: GaussianMixture) -> GaussianMixture:
    assert ensemble.target is not None
    shift, scale = float(ensemble.target.shift[0]), float(ensemble.target.scale[0])
    return GaussianMixture(shift + scale * answer.means, scale * answer.sds)


def peers(name: str, seed: int, steps: int, epochs: int = EPOCHS) -> Record:
    """Monte Carlo dropout, mean-field variational inference, and split conformal prediction."""
    case = Case.of(name, seed)
    x, y, new, shift, scale = case.standardised()

    def variational() -> GaussianMixture:
        return layered_mean_field(x, y, new, steps=steps, batch_size=_batch(len(x)), seed=seed)

    def dropping() -> GaussianMixture:
        return mc_dropout(x, y, new, seed=seed, recipe=recipe)

    recipe = Recipe(batch_size=_batch(len(x)), epochs=epochs)
    methods: Record = {}
    for label, work in (("MC dropout", dropping), ("MFVI", variational)):
        methods[label] = _attempt(case, work, shift, scale)
    try:
        intervals, seconds = _clocked(lambda: conformal(x, y, new, seed, recipe))
        ends = {level: shift + scale * part for level, part in intervals.items()}
        methods["conformal"] = {
            **in_unit(interval_scores(ends, case.target), case.unit),
            "cost": seconds,
        }
    except MissingPeerError as error:
        methods["conformal"] = {"missing": str(error)}
    return {"set": name, "split": seed, "methods": methods}


def sampled(name: str, seed: int, warmup: int, draws: int) -> Record:
    """NUTS on one hidden layer of 50, with its diagnostics: a chain that has not converged is
    no reference.
    """
    from ssla_paper.peers.sampling import chain

    case = Case.of(name, seed)
    x, y, new, shift, scale = case.standardised()
    told: Record = {}

    def draw() -> GaussianMixture:
        found = chain(
            x, y, new, hidden=(50,), heteroscedastic=False, warmup=warmup, draws=draws, seed=seed
        )
        told.update(r_hat=found.r_hat, effective=found.effective, divergent=found.divergent)
        return found.answer

    scored = _attempt(case, draw, shift, scale)
    return {"set": name, "split": seed, "methods": {"NUTS": {**scored, **told}}}


def _attempt(case: Case, work: Callable[[], GaussianMixture], shift: float, scale: float) -> Record:
    try:
        answer, seconds = _clocked(work)
    except MissingPeerError as error:
        return {"missing": str(error)}
    return case.scored(GaussianMixture(shift + scale * answer.means, scale * answer.sds), seconds)


def _batch(rows: int) -> int:
    return min(256, max(16, rows // 16))


def conformal(
    x: Tensor, y: Tensor, new: Tensor, seed: int, recipe: Recipe
) -> dict[float, np.ndarray]:
    """A fifth of the training rows (20 at least) calibrates, a tenth stops the training of the
    paper's network on the rest.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    calibrating, stopping = max(len(x) // 5, FEWEST), max(len(x) // 10, 1)
    aside, held, kept = order.split([calibrating, stopping, len(x) - calibrating - stopping])
    net = perceptron(x.shape[1], 1, generator)
    a, b = x.float(), y.float()
    train(net, (a[kept], b[kept]), (a[held], b[held]), squared_error, recipe, generator)

    def point(rows: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            out: np.ndarray = net(torch.from_numpy(rows).float())[:, 0].double().numpy()
        return out

    return split_conformal(point, x[aside].numpy(), y[aside].numpy(), new.numpy(), LEVELS)
