"""Every method on one trained network: the stated SSLA, ASSLA and LA, the correct computation, and
the plug-in.

The stated three are those of `ssla.paper_settings`: the last layer at its trained weights, N(0, 1)
as it is ("unit") or with its precision tuned by the evidence ("tuned"), and the structures kfac,
diag and dense. SSLA is one refit with the prediction and 20 candidates on ŷ ± 1.96 standard
deviations of the targets, outside of which its density is zero. Beside it, with kfac and the tuned
prior: "SSLA, whole line", without the grid; and "SSLA, every y", the refit with each y that the
derivation needs. "ours" is `ssla.fit` with the validation rows and its default predictive.

A refit that does not converge is answered by LA's predictive; such rows are counted, and the three
methods are scored again on the other rows ("refitted rows").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ssla
from ssla import metrics
from ssla.curvature.structure import NoFactorError
from ssla.likelihoods import HeteroscedasticGaussian
from ssla.priors import Gaussian
from ssla.refit.published_settings import STRUCTURES
from ssla_paper.peers import GaussianMixture
from ssla_paper.runner import Record
from ssla_paper.stated.data import Case, case
from ssla_paper.stated.network import trained
from ssla_paper.uci.ours import in_unit

LEVELS = (0.95, 0.90, 0.75, 0.50)
HALF_WIDTH = 1.96  # of the candidates' grid, in standard deviations of the training targets
PRIORS = ("unit", "tuned")
NODES = 200  # of log σ² in the integral of LA
Answer = Any  # a Predictive or a GaussianMixture
Rows = dict[str, Tensor]  # score -> its value at each row (n,)


def row_scores(answer: Answer, y: Tensor) -> Rows:
    """Return the negative log density, CRPS, squared error, and coverage and width by level (n,)."""
    is_mixture = isinstance(answer, GaussianMixture)
    crps = answer.crps(y) if is_mixture else metrics.crps(answer, y, reduce=False)
    found = {
        "nll": -answer.log_prob(y).double(),
        "crps": crps.double(),
        "square": (answer.mean.double() - y).square(),
    }
    for level in LEVELS:
        ends = answer.interval(level).double()
        name = f"{round(100 * level)}"
        found[f"cover{name}"] = 100 * ((y >= ends[:, 0]) & (y <= ends[:, 1])).double()
        found[f"width{name}"] = ends[:, 1] - ends[:, 0]
    return found


def mean_scores(rows: Rows, unit: float, chosen: Tensor | None = None) -> dict[str, float]:
    """Return the means over the chosen rows (n,), all by default, in the unit of the tables."""
    taken = slice(None) if chosen is None else chosen
    means = {name: float(values[taken].mean()) for name, values in rows.items()}
    rmse = means.pop("square") ** 0.5
    return in_unit({**means, "rmse": rmse}, unit)


def plug_in(net: nn.Module, x: Tensor) -> GaussianMixture:
    """Return N(μ(x), σ²(x)) of the network itself."""
    with torch.no_grad():
        f = net(x)
    return GaussianMixture(f[None, :, 0], (0.5 * f[None, :, 1]).exp())


def integrated(posterior: ssla.Posterior, x: Tensor) -> GaussianMixture:
    """Return LA by its integral, ∫ N(y; μ, exp(s)) N((μ, s); f̂, K) dμ ds, without a refit.

    s = log σ² takes the midpoints of NODES equal parts of its probability; given s, μ is Gaussian
    and its integral is in closed form.
    """
    f, K = (part.double() for part in posterior.outputs_at(x))
    levels = (torch.arange(NODES, dtype=torch.float64) + 0.5) / NODES
    off = torch.special.ndtri(levels)[:, None] * K[:, 1, 1].sqrt()
    mean = f[:, 0] + K[:, 0, 1] / K[:, 1, 1] * off
    variance = K[:, 0, 0] - K[:, 0, 1].square() / K[:, 1, 1] + (f[:, 1] + off).exp()
    return GaussianMixture(mean, variance.sqrt())


def scored(
    name: str,
    seed: int,
    rate: float,
    batch: int,
    epochs: int | None = None,
    structures: tuple[str, ...] = STRUCTURES,
    refits: int | None = None,
) -> Record:
    """Train one network of one set and split, and score every method on it.

    refits: how many test rows have SSLA at most; None: all of them. epochs: fewer, for tests.
    """
    rows = case(name, seed)
    net, loss = trained(rows, rate, batch, seed, epochs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is counted
        methods, refitted, precisions = _all_methods(rows, net, structures, refits)
    return {
        "set": name,
        "split": seed,
        "rows": [len(part[1]) for part in (rows.train, rows.validation, rows.test)],
        "loss": loss,
        "precision": precisions,
        "methods": methods,
        "refitted": refitted,
    }


def _all_methods(
    rows: Case, net: nn.Module, structures: tuple[str, ...], refits: int | None
) -> tuple[Record, Record, Record]:
    """Return scores by method, those of rows with real refits, and the tuned precisions."""
    asked = _Asked(rows)
    asked.add("plug-in", lambda: plug_in(net, rows.test[0]))
    asked.add("ours", lambda: _ours(rows, net).predict(rows.test[0]))
    precisions: Record = {}
    for structure in structures:
        settings = ssla.paper_settings(
            HALF_WIDTH * float(rows.train[1].std(correction=0)), structure=structure
        )
        try:
            posterior = ssla.fit(
                net, rows.train, likelihood=HeteroscedasticGaussian(), **settings.fit
            )
            tuned = posterior.tune(**settings.tune)
        except NoFactorError as error:
            precisions[structure] = str(error)[:80]
            continue
        assert isinstance(tuned.prior, Gaussian)
        precisions[structure] = float(tuned.prior.precision)  # type: ignore[arg-type]
        for prior, at in zip(PRIORS, (posterior, tuned), strict=True):
            label = f"{structure} {prior}"
            for method in ("LA", "ASSLA"):
                asked.add(
                    f"{method} {label}",
                    partial(at.predict, rows.test[0], refit=settings.refits[method]),
                )
            asked.add_refits(f"SSLA {label}", label, at, settings.refits["SSLA"], refits)
        if structure == "kfac":
            asked.add("LA, integral", partial(integrated, tuned, rows.test[0]))
            whole = ssla.WeightRefit(at="prediction", logdet="structure")
            asked.add_refits("SSLA, whole line", "whole line", tuned, whole, refits)
            each = ssla.WeightRefit(at="candidate", logdet="structure")
            asked.add_refits("SSLA, every y", "every y", tuned, each, refits)
    return asked.methods, asked.refitted, precisions


def _ours(rows: Case, net: nn.Module) -> ssla.Posterior:
    return ssla.fit(
        net, rows.train, likelihood=HeteroscedasticGaussian(), validation=rows.validation
    )


class _Asked:
    """The methods that were asked on one case: scores, and rows by row for pairs."""

    def __init__(self, rows: Case) -> None:
        self.rows = rows
        self.by_row: dict[str, Rows] = {}
        self.methods: Record = {}
        self.refitted: Record = {}

    def add(self, label: str, ask: Callable[[], Answer]) -> None:
        """Score a method on all test rows; a curvature without a factor is noted."""
        try:
            answer = ask()
        except NoFactorError as error:
            self.methods[label] = {"error": str(error)[:80]}
            return
        self.by_row[label] = row_scores(answer, self.rows.test[1])
        self.methods[label] = {
            **mean_scores(self.by_row[label], self.rows.unit),
            **counts(answer, self.by_row[label]),
        }

    def add_refits(
        self, label: str, pair: str, posterior: ssla.Posterior, refit: Any, most: int | None
    ) -> None:
        """Score SSLA on at most `most` rows, and it with ASSLA and LA where its refits converged.

        pair: structure and prior of the two others, or the name of a variant, which is compared
        with kfac and the tuned prior.
        """
        x, y = self.rows.test[0][:most], self.rows.test[1][:most]
        try:
            answer = posterior.predict(x, refit=refit)
        except NoFactorError as error:
            self.methods[label] = {"error": str(error)[:80]}
            return
        own = row_scores(answer, y)
        self.methods[label] = {**mean_scores(own, self.rows.unit), **counts(answer, own)}
        good = ~answer.diagnostics.unconverged
        others = pair if pair in {f"{s} {p}" for s in STRUCTURES for p in PRIORS} else "kfac tuned"
        found: Record = {"rows": int(good.sum())}
        if found["rows"]:
            found["SSLA"] = mean_scores(own, self.rows.unit, good)
            for method in ("ASSLA", "LA"):
                kept = {k: v[:most] for k, v in self.by_row[f"{method} {others}"].items()}
                found[method] = mean_scores(kept, self.rows.unit, good)
            plain = {k: v[:most] for k, v in self.by_row["plug-in"].items()}
            found["plug-in"] = mean_scores(plain, self.rows.unit, good)
        self.refitted[pair] = found


def counts(answer: Answer, rows: Rows) -> dict[str, int]:
    """Return how many rows were scored, were answered otherwise, are inaccurate, have more than 2%
    of their mass cut by the grid, or a target outside of it.
    """
    flags = getattr(answer, "diagnostics", None)
    if flags is None:
        return {"rows": len(answer.mean)}
    return {
        "rows": len(answer.mean),
        "outside": int(rows["nll"].isinf().sum()),
        "unconverged": int(flags.unconverged.sum()),
        "fisher": int(flags.fallback.sum()),
        "inaccurate": int(flags.inaccurate.sum()),
        "cut": 0 if flags.cut is None else int((flags.cut > 0.02).sum()),
    }
