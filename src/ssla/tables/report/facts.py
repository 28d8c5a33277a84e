"""The numbers of the report, as plain values: scores, calibration, and each shown row under several
strengths of the prior.

Predictions of all rows are made in blocks, and only a few numbers of each row are kept, so memory
is bounded. The bounds over the priors of the slider are the smallest and the largest of its values:
a credal set of five priors.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssla import metrics
from ssla.maths.quadrature import wrapped
from ssla.plots.calibration import Ranks, binomial_range
from ssla.posterior import explain
from ssla.predictive.cavities import ranks
from ssla.tables.report.subject import Subject, take

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)  # on the precision of the prior
OWN = FACTORS.index(1.0)
LEVELS = (0.5, 0.9, 0.95)
CURVE_LEVELS = 19
BOOLEAN = ("flagged", "off_centre", "hit")  # names of measures by row
BINS = 10
CONFIDENCE = 0.95
BLOCK = 4096  # rows that are predicted together
GRID = 45  # points of a density
GRID_TAIL = 0.002
MOST_BARS = 60  # counts in a picture
MOST_CLASSES = 12  # of one row; the others are added up
HEIGHT = 1000  # densities are whole numbers up to this
DOUBTFUL = 10  # rows that are listed as out-of-distribution
INFLUENTIAL = 5
SHOWN_EFFECTS = 3  # inputs
CELL_LENGTHS = (60, 24, 12)  # characters of an input that is a text
INPUT_BYTES = 2_000_000
LARGEST_EXPLAINED = 50_000  # training rows


def collect(subject: Subject, max_rows: int) -> dict[str, Any]:
    """All that the page shows, but for texts."""
    own, plug_in = _measured(subject, None), _measured(subject, "plug_in")
    kind = own["kind"]
    n = len(subject.y)
    share = own["epistemic"] / (own["epistemic"] + own["aleatoric"]).clamp_min(1e-300)
    shown = choose(own["nll"], share, max_rows)
    factors = (1.0,) if subject.fixed_prior else FACTORS
    rows = _rows(subject, shown, factors, kind)
    at = torch.from_numpy(shown)
    rows |= {
        "id": [int(subject.labels[i]) if subject.labels is not None else int(i) + 1 for i in shown],
        "y": _plain(subject.y[at]),
        "nll": _plain(own["nll"][at]),
        "share": _plain(share[at]),
        "flagged": own["flagged"][at].int().tolist(),
        "inputs": _inputs(subject.inputs(shown)),
    }
    if kind != "class":
        rows["rank"] = _plain(((own["lower"] + own["upper"]) / 2)[at])
    order = share[at].argsort(descending=True, stable=True)
    doubtful = order[:DOUBTFUL].tolist()
    return {
        "kind": kind,
        "target": subject.target,
        "n": n,
        "shown": len(shown),
        "classes": list(subject.classes or ()) or _numbered(own),
        "levels": list(LEVELS),
        "factors": list(factors),
        "own": factors.index(1.0),
        "fixedPrior": subject.fixed_prior,
        "inputNames": list(subject.input_names),
        "scores": [[name, value, _scores(plug_in)[name]] for name, value in _scores(own).items()],
        "flagged": int(own["flagged"].sum()),
        "off_centre": int(own["off_centre"].sum()),
        "medianShare": float(share.median()),
        **(_of_classes(own, plug_in) if kind == "class" else _of_numbers(own, plug_in)),
        "doubtful": doubtful,
        "why": _explained(subject, shown, doubtful),
        "rows": rows,
    }


def choose(nll: Tensor, share: Tensor, most: int) -> np.ndarray:
    """The rows to show: all, or the worst predicted (a quarter), the most doubtful (a quarter),
    and evenly spaced ones.
    """
    n = len(nll)
    if n <= most:
        return np.arange(n)
    quarter = most // 4
    chosen = {*nll.argsort(descending=True, stable=True)[:quarter].tolist()}
    chosen |= {*share.argsort(descending=True, stable=True)[:quarter].tolist()}
    others = np.setdiff1d(np.arange(n), np.array(sorted(chosen), dtype=int))
    spaced = others[np.linspace(0, len(others) - 1, most - len(chosen)).round().astype(int)]
    return np.union1d(np.array(sorted(chosen), dtype=int), spaced)


def _measured(subject: Subject, refit: str | None) -> dict[str, Any]:
    """Numbers (n,) of every row, and for levels (n, L)."""
    parts = []
    for rows in np.array_split(np.arange(len(subject.y)), math.ceil(len(subject.y) / BLOCK)):
        predictive = subject.predict(rows, refit, 1.0)
        if predictive.kind == "vector":
            raise ValueError(
                "The report is for one target, but the model has several. Fit and report one "
                "target at a time."
            )
        parts.append(measure(predictive, subject.y[torch.from_numpy(rows)]))
    return {"kind": predictive.kind} | {
        name: torch.cat([part[name] for part in parts]) for name in parts[0]
    }


def measure(p: Any, y: Tensor) -> dict[str, Tensor]:
    """What scores and pictures are made of."""
    regions = [p.interval(level) for level in LEVELS]
    doubt = p.diagnostics
    found = {
        "nll": metrics.nll(p, y, reduce=False),
        "flagged": doubt.inaccurate | doubt.unconverged,
        "off_centre": doubt.off_centre,
        "mass": p.mass,
    }
    if p.kind == "class":
        code = y.long()
        sure, guess = p.probs.max(1)
        found |= {
            "sure": sure,
            "hit": guess == code,
            "brier": metrics.brier(p, y, reduce=False),
            "inside": torch.stack([region.gather(1, code[:, None])[:, 0] for region in regions], 1),
            "width": torch.stack([region.sum(1) for region in regions], 1),
            "epistemic": p.epistemic.reshape(len(y), -1).sum(1),
            "aleatoric": p.aleatoric.reshape(len(y), -1).sum(1),
            "classes": torch.full((len(y),), p.probs.shape[1]),
        }
    else:
        near = p.mean + wrapped(y - p.mean) if p.kind == "circular" else y
        lower, upper = ranks(p, y)
        found |= {
            "square": (p.mean - near) ** 2,
            "inside": torch.stack(
                [(near >= region[:, 0]) & (near <= region[:, 1]) for region in regions], 1
            ),
            "width": torch.stack([region[:, 1] - region[:, 0] for region in regions], 1),
            "lower": lower,
            "upper": upper,
            "epistemic": p.epistemic,
            "aleatoric": p.aleatoric,
        }
        if p.kind != "circular":
            found["crps"] = metrics.crps(p, y, reduce=False)
    return {
        name: value.to("cpu", torch.bool if name in BOOLEAN else torch.float64)
        for name, value in found.items()
    }


def _scores(found: dict[str, Any]) -> dict[str, float]:
    names = {"nll": "negative log-likelihood", "crps": "CRPS", "brier": "Brier score"}
    scores = {text: float(found[name].mean()) for name, text in names.items() if name in found}
    if found["kind"] == "class":
        scores |= {
            "accuracy": float(found["hit"].double().mean()),
            "calibration error (ECE)": _ece(found),
        }
    else:
        scores["RMSE of the mean"] = float(found["square"].mean().sqrt())
        q = torch.arange(1, 20, dtype=torch.float64) / 20
        middle = (found["lower"] + found["upper"]) / 2
        scores["calibration error"] = float(
            ((middle[:, None] <= q).double().mean(0) - q).abs().mean()
        )
    what, size = (
        ("set", "mean size of the")
        if found["kind"] == "class"
        else ("interval", "mean width of the")
    )
    for i, level in enumerate(LEVELS):
        scores[f"share inside the {level:.0%} {what}"] = float(found["inside"][:, i].mean())
    for i, level in enumerate(LEVELS):
        scores[f"{size} {level:.0%} {what}"] = float(found["width"][:, i].mean())
    return scores | {"mean mass (1 is exact)": float(found["mass"].mean())}


def _ece(found: dict[str, Any], bins: int = 15) -> float:
    place = (found["sure"] * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add(
        0, place, found["hit"].double() - found["sure"]
    )
    return float(gap.abs().sum() / len(place))


def _of_numbers(own: dict[str, Any], plug_in: dict[str, Any]) -> dict[str, Any]:
    """The curve of coverage by level, and the PIT histogram, with the ranges in which a
    calibrated model would be.
    """
    n = len(own["nll"])
    levels = np.linspace(0, 1, CURVE_LEVELS + 2)[1:-1]
    ranked, other = (
        Ranks(f["lower"], f["upper"], torch.ones(n, dtype=torch.float64)) for f in (own, plug_in)
    )
    low, high = (
        np.array([binomial_range(n, float(level), CONFIDENCE) for level in levels]).T / n
    ).tolist()
    ends = [end * BINS / n for end in binomial_range(n, 1 / BINS, CONFIDENCE)]
    curve = {
        "level": levels.tolist(),
        "inside": ranked.inside(levels),
        "plugIn": other.inside(levels),
        "low": low,
        "high": high,
    }
    pit = {
        "heights": ranked.heights(BINS).tolist(),
        "plugIn": other.heights(BINS).tolist(),
        "low": ends[0],
        "high": ends[1],
    }
    return {"calibration": curve, "pit": pit, "expected": _expected(n)}


def _of_classes(own: dict[str, Any], plug_in: dict[str, Any]) -> dict[str, Any]:
    """Accuracy by the probability of the predicted class."""
    found = {}
    for name, part in (("own", own), ("plugIn", plug_in)):
        place = (part["sure"] * BINS).long().clamp(0, BINS - 1)
        bins = []
        for b in place.unique().tolist():
            chosen = place == b
            count, sure = int(chosen.sum()), float(part["sure"][chosen].mean())
            low, high = (end / count for end in binomial_range(count, sure, CONFIDENCE))
            bins.append([sure, float(part["hit"][chosen].double().mean()), count, low, high])
        found[name] = bins
    return {"reliability": found, "expected": _expected(len(own["nll"]))}


def _expected(n: int) -> list[list[float]]:
    """Between which shares the coverage of each level would be, if calibrated."""
    return [[end / n for end in binomial_range(n, level, CONFIDENCE)] for level in LEVELS]


def _rows(
    subject: Subject, shown: np.ndarray, factors: tuple[float, ...], kind: str
) -> dict[str, Any]:
    """By row: numbers under each factor, and what is drawn."""
    blocks = []
    for rows in np.array_split(shown, math.ceil(len(shown) / BLOCK)):
        predictives = [subject.predict(rows, None, factor) for factor in factors]
        y = subject.y[torch.from_numpy(rows)]
        blocks.append(
            _class_rows(predictives, y) if kind == "class" else _number_rows(predictives, kind)
        )
    return {name: [value for block in blocks for value in block[name]] for name in blocks[0]}


def _number_rows(predictives: list[Any], kind: str) -> dict[str, Any]:
    stacked = {
        "mean": [p.mean for p in predictives],
        "doubt": [p.epistemic.clamp_min(0).sqrt() for p in predictives],
        "noise": [p.aleatoric.clamp_min(0).sqrt() for p in predictives],
    }
    found: dict[str, Any] = {
        name: _plain(torch.stack(parts, 1).double().cpu()) for name, parts in stacked.items()
    }
    ends = [torch.stack([p.interval(level) for level in LEVELS], 1) for p in predictives]
    found["interval"] = _plain(torch.stack(ends, 1).double().cpu())  # (k, factors, levels, 2)
    return found | _densities(predictives, kind)


def _densities(predictives: list[Any], kind: str) -> dict[str, Any]:
    """Densities on one grid for all factors: start, step, and heights in whole numbers,
    `HEIGHT` the largest of the row.
    """
    if kind == "circular":
        low = predictives[0].mean.double().cpu() - math.pi
        high = low + 2 * math.pi
    else:
        q = torch.tensor([GRID_TAIL, 1 - GRID_TAIL], dtype=torch.float64)
        ends = torch.stack([p.icdf(q).double().cpu() for p in predictives])
        low, high = ends[..., 0].amin(0), ends[..., 1].amax(0)
    if kind == "count":
        step = ((high - low + 1) / MOST_BARS).ceil().clamp_min(1)
        points = int(((high - low) / step).ceil().max()) + 1
    else:
        points = GRID
        step = (high - low) / (points - 1)
    grid = low[:, None] + step[:, None] * torch.arange(points, dtype=torch.float64)
    where = wrapped(grid) if kind == "circular" else grid
    heights = torch.stack(
        [p.log_prob(where).double().cpu().exp() for p in predictives], 1
    )  # (k, factors, points)
    top = heights.amax((1, 2)).clamp_min(1e-300)
    scaled = (heights / top[:, None, None] * HEIGHT).round().int().tolist()
    if kind == "count":  # rows have pictures of different lengths
        lengths = (((high - low) / step).floor().int() + 1).tolist()
        scaled = [
            [part[:length] for part in row] for row, length in zip(scaled, lengths, strict=True)
        ]
    return {"start": _plain(low, 8), "step": _plain(step, 8), "heights": scaled}


def _class_rows(predictives: list[Any], y: Tensor) -> dict[str, Any]:
    """The most probable classes of each row under any factor, and always the observed one."""
    probs = torch.stack([p.probs.double().cpu() for p in predictives], 1)  # (k, factors, C)
    rank = probs.amax(1).scatter(1, y.long()[:, None], 2.0)
    top = rank.topk(min(MOST_CLASSES, probs.shape[2]), 1).indices.sort(1).values
    chosen = probs.gather(2, top[:, None].expand(-1, probs.shape[1], -1))
    sets = torch.stack(
        [torch.stack([p.interval(level).sum(1) for level in LEVELS], 1) for p in predictives], 1
    )
    total = {"doubt": "epistemic", "noise": "aleatoric"}
    split = {
        name: _plain(
            torch.stack(
                [
                    getattr(p, part).reshape(len(y), -1).sum(1).clamp_min(0).sqrt()
                    for p in predictives
                ],
                1,
            )
            .double()
            .cpu()
        )
        for name, part in total.items()
    }
    label = probs.argmax(2)
    return {
        "classes": top.tolist(),
        "probs": _plain(chosen),
        "label": label.tolist(),
        "sure": _plain(probs.amax(2)),
        "sizes": sets.int().cpu().tolist(),
    } | split


def _explained(subject: Subject, shown: np.ndarray, doubtful: list[int]) -> dict[str, Any]:
    """Why the most doubtful rows are unsure, by their place among the shown; empty where it is
    not known.
    """
    post = subject.posterior
    if subject.at_mean is not None:
        return _by_inputs(subject, shown, doubtful)
    if post is None or post.source is None or post.report.n > LARGEST_EXPLAINED:
        return {}
    found = explain(post, take(subject.x, shown[doubtful]), top=INFLUENTIAL)
    why = {}
    for i, place in enumerate(doubtful):
        effect = found.influence.mean[i].abs().sum(1)
        doubt = float(found.split.doubt[i].sum())
        why[str(place)] = {
            "rows": [
                [int(row) + 1, _short(float(e))]
                for row, e in zip(found.influence.rows[i], effect, strict=True)
            ],
            "inputs": _largest(found.inputs[i] / doubt)
            if found.inputs is not None and doubt > 0
            else [],
            "prior": _short(float(found.split.prior[i].sum()) / doubt) if doubt > 0 else None,
        }
    return why


def _by_inputs(subject: Subject, shown: np.ndarray, doubtful: list[int]) -> dict[str, Any]:
    """The share of the doubt that goes when one input is at its training mean, as
    `ssla.explain` has it for a posterior.
    """
    assert subject.at_mean is not None
    rows = shown[doubtful]
    doubt = _doubt(subject.predict(rows, None, 1.0))
    parts = [1 - _doubt(subject.at_mean(rows, j)) / doubt for j in range(len(subject.input_names))]
    falls = torch.stack(parts, 1).nan_to_num(0.0, 0.0, 0.0)  # no doubt: nothing to explain
    return {
        str(place): {"rows": [], "inputs": _largest(falls[i]), "prior": None}
        for i, place in enumerate(doubtful)
    }


def _doubt(p: Any) -> Tensor:
    total: Tensor = p.epistemic.double().cpu().reshape(p.law.rows, -1).sum(1)
    return total


def _largest(falls: Tensor) -> list[list[Any]]:
    top = falls.abs().argsort(descending=True, stable=True)[:SHOWN_EFFECTS].tolist()
    return [[j, _short(float(falls[j]))] for j in top]


def _numbered(found: dict[str, Any]) -> list[str]:
    return [str(i) for i in range(int(found["classes"][0]))] if "classes" in found else []


def _plain(values: Tensor, digits: int = 6) -> Any:
    """Nested lists of numbers with few digits; None for what JSON cannot hold."""
    if values.dim() == 1:
        return [_short(value, digits) for value in values.tolist()]
    return [_plain(part, digits) for part in values]


def _short(value: float, digits: int = 6) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def _inputs(rows: list[list[Any]]) -> list[list[Any]]:
    """The cells; long texts are cut, shorter if all cells together exceed the bytes that a page
    has for them.
    """
    cut: list[list[Any]] = []
    for length in CELL_LENGTHS:
        cut = [[_cell(cell, length) for cell in row] for row in rows]
        if len(json.dumps(cut, ensure_ascii=False).encode()) <= INPUT_BYTES:
            break
    return cut


def _cell(value: Any, length: int) -> Any:
    if isinstance(value, int | float):
        return _short(float(value), 5)
    text = "" if value is None else str(value)
    return text if len(text) <= length else text[: length - 1] + "…"
