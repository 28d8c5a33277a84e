"""What the mode of the last layer does: kept ("tilt", "as_is"), or moved to the mode of the
posterior on the training rows ("polish").

For each: the mean of log σ² and of the squared standardised residual z² at training, validation and
test rows, which are the two parts of the network's own NLL, and the scores of plug-in, ASSLA, LA
and two refits. Of each method also its worst test row: that row's NLL, σ(x) and z².
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import ssla
from ssla.curvature.structure import NoFactorError
from ssla.likelihoods import HeteroscedasticGaussian
from ssla.refit import Refit
from ssla_paper.peers import GaussianMixture
from ssla_paper.runner import Record
from ssla_paper.stated.data import Pair, case
from ssla_paper.stated.methods import (
    HALF_WIDTH,
    Answer,
    counts,
    mean_scores,
    row_scores,
)
from ssla_paper.stated.network import trained

MODES = ("tilt", "as_is", "polish")
STRUCTURE = "kfac"


def modes(
    name: str,
    seed: int,
    rate: float,
    batch: int,
    epochs: int | None = None,
    tested: int | None = None,
) -> Record:
    """Fit one trained network in each mode under N(0, 1), and score the methods.

    tested: how many test rows at most, for tests.
    """
    rows = case(name, seed)
    rows = replace(rows, test=(rows.test[0][:tested], rows.test[1][:tested]))
    net, _ = trained(rows, rate, batch, seed, epochs)
    settings = ssla.paper_settings(
        HALF_WIDTH * float(rows.train[1].std(correction=0)), structure=STRUCTURE
    )
    parts = {"train": rows.train, "validation": rows.validation, "test": rows.test}
    found: Record = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is counted
        for mode in MODES:
            kept = {**settings.fit, "mode": mode}
            try:
                unit = ssla.fit(net, rows.train, likelihood=HeteroscedasticGaussian(), **kept)
            except ValueError as error:  # no factor, or no mode
                found[mode] = {"error": f"{type(error).__name__}: {error}"[:120]}
                continue
            found[mode] = {
                "at": {part: network_facts(unit, pair) for part, pair in parts.items()},
                "methods": _methods(unit, rows.test, rows.unit),
            }
    return {"set": name, "split": seed, "modes": found}


def network_facts(posterior: ssla.Posterior, pair: Pair) -> dict[str, float]:
    """Return the parts of the NLL of the network at θ̂ on some rows.

    nll = ½ (mean of log σ² + mean of z² + log 2π), z = (y − μ)/σ.
    """
    x, y = pair
    f = posterior.outputs_at(x).mean.double()
    z2 = (y - f[:, 0]).square() * torch.exp(-f[:, 1])
    log_variance, squares = float(f[:, 1].mean()), float(z2.mean())
    return {
        "nll": 0.5 * (log_variance + squares + math.log(2 * math.pi)),
        "log variance": log_variance,
        "z2": squares,
        "least sigma": float((0.5 * f[:, 1].min()).exp()),
        "largest z2": float(z2.max()),
    }


def _methods(posterior: ssla.Posterior, test: Pair, unit: float) -> Record:
    """Return scores and the worst row of each method."""
    x, y = test
    f = posterior.outputs_at(x).mean.double()
    at_mode = GaussianMixture(f[None, :, 0], (0.5 * f[None, :, 1]).exp())
    refits: dict[str, Refit] = {
        "ASSLA": ssla.NoRefit(),
        "LA": ssla.OutputRefit(),
        "SSLA": ssla.WeightRefit(at="prediction", logdet="structure"),
        "SSLA, every y": ssla.WeightRefit(at="candidate", logdet="structure"),
    }
    asked: dict[str, Callable[[], Answer]] = {"plug-in": lambda: at_mode}
    asked |= {name: partial(posterior.predict, x, refit=refit) for name, refit in refits.items()}
    made: Record = {}
    for name, ask in asked.items():
        try:
            answer = ask()
        except NoFactorError as error:
            made[name] = {"error": str(error)[:80]}
            continue
        scores = row_scores(answer, y)
        made[name] = {
            **mean_scores(scores, unit),
            **counts(answer, scores),
            "worst": _worst(scores["nll"], answer, at_mode, y),
        }
    return made


def _worst(losses: Tensor, answer: Answer, network: GaussianMixture, y: Tensor) -> Record:
    """Return the row of the largest loss: its loss, the network's σ and z², and its share."""
    row = int(losses.argmax())
    sigma = float(network.stddev[row])
    residual = float(y[row] - network.mean[row])
    ends = answer.interval(0.95).double()[row]
    flags = getattr(answer, "diagnostics", None)
    return {
        "row": row,
        "nll": float(losses[row]),
        "others": float(losses[torch.arange(len(losses)) != row].mean()),
        "sigma": sigma,
        "z2": (residual / sigma) ** 2,
        "width95": float(ends[1] - ends[0]),
        "unconverged": bool(flags is not None and flags.unconverged[row]),
        "inaccurate": bool(flags is not None and flags.inaccurate[row]),
    }
