"""Ablations, one setting changed at a time: curvature, structure, selected weights, refit, prior,
mode.

The base is a dense last layer, polished, the prior by the evidence, the output refit. Classes: the
digits 0–4. Regression: the toy with (μ, log σ²), and a table with Gaussian noise, tested on inputs
like the training inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import ssla
from ssla.likelihoods import Categorical, Likelihood
from ssla.tables.networks import fit_ensemble
from ssla_paper.peers import scores
from ssla_paper.robustness import data
from ssla_paper.robustness.covariate import settings_for
from ssla_paper.robustness.methods import quiet, trained
from ssla_paper.robustness.scores import class_scores
from ssla_paper.runner import Record

EVIDENCE, HELD_OUT = "evidence", "held-out NLL"
REFITTED = 80  # rows of classes: SSLA refits each five times
PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Variant:
    """One variant; tuned: a precision, or how it is chosen."""

    factor: str
    level: str
    refit: Any = "output"
    structure: str = "dense"
    weights: str = "last_layer"
    tuned: str | float = EVIDENCE
    mode: str | None = None


def variants() -> list[Variant]:
    """The base is the level of each factor that is marked by (default)."""
    found = [
        Variant("refit", "plug-in", ssla.PlugIn()),
        Variant("refit", "none (ASSLA)", "none"),
        Variant("refit", "newton", "newton"),
        Variant("refit", "output (default)"),
        Variant("refit", "weights (SSLA)", "weights"),
    ]
    found += [
        Variant("curvature", f"none, {kind}", ssla.NoRefit(kind))
        for kind in ("observed", "fisher", "empirical")
    ]
    found += [Variant("curvature", "weights, fisher", ssla.WeightRefit(curvature="fisher"))]
    found += [Variant("structure", "dense (default)")]
    found += [Variant("structure", kind, structure=kind) for kind in ("kfac", "diag", "low_rank")]
    found += [Variant("weights", "last layer, kfac", structure="kfac")]
    found += [
        Variant("weights", f"all, {kind}", structure=kind, weights="all")
        for kind in ("kfac", "diag", "low_rank")
    ]
    found += [Variant("prior", f"{precision:g}", tuned=precision) for precision in PRECISIONS]
    found += [Variant("prior", "evidence (default)"), Variant("prior", HELD_OUT, tuned=HELD_OUT)]
    return [*found, Variant("mode", "polish (default)"), Variant("mode", "tilt", mode="tilt")]


@dataclass(frozen=True, eq=False)
class Case:
    """A trained network with its rows; held_out (n,) are held-out rows."""

    module: torch.nn.Module
    x: Tensor
    y: Tensor
    held_out: Tensor
    likelihood: Likelihood
    new: Tensor
    scored: Callable[[Any], Record]
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def posterior(self, variant: Variant) -> Any:
        """Computed once for all refits."""
        key = (variant.structure, variant.weights, variant.tuned, variant.mode)
        if key not in self.known:
            self.known[key] = self._fitted(variant)
        return self.known[key]

    def _fitted(self, variant: Variant) -> ssla.Posterior:
        rows = ~self.held_out if variant.tuned == HELD_OUT else torch.ones_like(self.held_out)
        posterior = ssla.fit(
            self.module,
            (self.x[rows], self.y[rows]),
            likelihood=self.likelihood,
            prior=ssla.priors.Gaussian(variant.tuned if isinstance(variant.tuned, float) else 1.0),
            gaussian="laplace",
            weights=variant.weights,
            structure=variant.structure,
            mode=variant.mode or ("polish" if variant.weights == "last_layer" else None),
        )
        if variant.tuned == EVIDENCE:
            return posterior.tune(over=("prior",), per_layer=False)
        if variant.tuned == HELD_OUT:
            held = (self.x[self.held_out], self.y[self.held_out])
            return posterior.tune(objective="nll", data=held, over=("prior",), per_layer=False)
        return posterior

    def record(self, variant: Variant) -> Record:
        with quiet():
            posterior = self.posterior(variant)
            start = time.perf_counter()
            predictive = posterior.predict(self.new, variant.refit)
            took = time.perf_counter() - start
            found = self.scored(predictive)
        bad = float(predictive.diagnostics.inaccurate.double().mean())
        if bad > 0:
            found = dict.fromkeys(found)
        mass = float(predictive.mass.double().median())
        return {
            "factor": variant.factor,
            "level": variant.level,
            **found,
            "mass": mass,
            "no_density": bad,
            "predict": took,
        }


def one(
    dataset: str, seed: int, size: float = 1.0, epochs: int = 200, skip: Sequence[str] = ()
) -> Record:
    """Every variant on one case."""
    case = (
        _classes(dataset, seed, size, epochs)
        if dataset in data.SIZES
        else _regression(dataset, seed, size, epochs)
    )
    chosen = [variant for variant in variants() if variant.factor not in skip]
    if dataset not in data.SIZES:  # the pipeline's noise already comes from the held-out rows
        chosen = [variant for variant in chosen if variant.tuned != HELD_OUT]
    return {
        "dataset": dataset,
        "seed": seed,
        "variants": [case.record(variant) for variant in chosen],
    }


def _classes(dataset: str, seed: int, size: float, epochs: int) -> Case:
    found = data.classes(dataset, seed, size)
    methods = trained(found.x, found.y, found.count, seed, epochs, members=1)

    def scored(predictive: Any) -> Record:
        return {**class_scores(predictive.probs.double(), found.target[:REFITTED])}

    return Case(
        methods.modules[0],
        found.x,
        found.y,
        methods.held_out[0],
        Categorical(),
        found.new[:REFITTED],
        scored,
    )


def _regression(dataset: str, seed: int, size: float, epochs: int) -> Case:
    """The network, the noise and the rows of the library's own pipeline, standardised."""
    found = data.regression(dataset, seed, size)
    settings = settings_for(found, seed, epochs, 1)
    whole = fit_ensemble(found.x, found.y, torch.ones(len(found.x)).double(), settings)
    assert whole.target is not None
    inside = found.distance == 0
    target = whole.target(found.target[inside][:, None])[:, 0]
    none = torch.zeros(len(found.x), dtype=torch.bool)

    def scored(predictive: Any) -> Record:
        findings = scores(predictive, target)
        return {key: findings[key] for key in ("nll", "crps", "cover95", "width95")}

    y = whole.target(found.y[:, None])[:, 0]
    likelihood = whole.components[0].posterior.likelihood
    return Case(
        whole.modules[0],
        whole.inputs(found.x),
        y,
        none,
        likelihood,
        whole.inputs(found.new[inside]),
        scored,
    )
