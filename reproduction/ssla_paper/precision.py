"""The intermediate regime: the error of subtracting two float32 sums over n, and of increments.

Normal–normal model, X_i ~ N(4, 2), prior N(4, 1). The published column is ASSLA by subtraction: ℓ
over n + 1 rows less ℓ over n rows, both in float32, so that each log density is rounded to the
spacing of float32 numbers near ℓ ≈ −1.77 n. Its error is half that spacing, in steps of powers of
two, for every method: it comes from the sums and not from the curvature. Both parts are measured.
Beside it: the library's own predictive from a float32 network and rows, and from float64 ones,
compared with the exact N(μ_n, σ² + σ_n²). Its sums over rows are in float64 in both cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import ssla
from ssla_paper.runner import OURS, REPEATED, Claim, Record, Task
from ssla_paper.tables import Cell, Table, draw

MEAN, VARIANCE, PRIOR_MEAN, PRIOR_VARIANCE = 4.0, 2.0, 4.0, 1.0
SIZES = (100_000, 200_000, 300_000, 500_000, 700_000, 900_000, 1_000_000)
LARGER = (10_000_000, 100_000_000)
RUNS = 6
PUBLISHED = {  # n: KL and largest |log| error, each the mean and standard deviation of six runs
    100_000: ((9.41e-6, 1.3e-6), (7.57e-3, 3.1e-4)),
    200_000: ((5.02e-5, 2.3e-6), (1.55e-2, 2.7e-5)),
    300_000: ((1.41e-4, 3.3e-6), (3.05e-2, 5.1e-4)),
    500_000: ((1.40e-4, 3.3e-6), (3.06e-2, 3.1e-4)),
    700_000: ((4.75e-4, 4.6e-7), (5.86e-2, 2.1e-3)),
    900_000: ((4.76e-4, 2.0e-6), (5.72e-2, 2.7e-3)),
    1_000_000: ((4.75e-4, 9.2e-7), (5.69e-2, 2.6e-3)),
}
BATCH = 1_000_000


class Draws:
    """n rows (1, X) drawn in float32, batch by batch."""

    def __init__(self, n: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.n, self.seed, self.dtype = n, seed, dtype

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.n, BATCH):
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + start // BATCH)
            count = min(BATCH, self.n - start)
            x = MEAN + math.sqrt(VARIANCE) * torch.randn(count, generator=generator)
            yield torch.ones(count, 1, dtype=self.dtype), x.to(self.dtype)


def one(n: int, seed: int) -> Record:
    """One data set: the errors of subtraction in float32 and float64 (n ≤ 10⁶), and of the
    library.
    """
    total, squares = 0.0, 0.0
    for _, x in Draws(n, seed):
        total += float(x.double().sum())
        squares += float(x.double().square().sum())
    mean = total / n
    spread = 1 / (n / VARIANCE + 1 / PRIOR_VARIANCE)
    exact_mean = spread * (PRIOR_MEAN / PRIOR_VARIANCE + total / VARIANCE)
    y = exact_mean + math.sqrt(VARIANCE) * torch.linspace(-4, 4, 201, dtype=torch.float64)
    found: Record = {"n": n, "seed": seed}
    if n <= max(SIZES):
        x = torch.cat([x for _, x in Draws(n, seed)])
        stable = _normal(y, torch.tensor(mean, dtype=torch.float64), VARIANCE) - 0.5 * math.log1p(
            1 / n
        )
        for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
            sums, curvature, differences = by_subtraction(x.to(dtype), y.to(dtype))
            parts = sums - stable, curvature + 0.5 * math.log1p(1 / n)
            found[name] = {
                "error": _largest(parts[0]),
                "curvature": _largest(parts[1]),
                "kl": divergence(y, stable, sums),
                "zero": float((differences == 0).double().mean()),
                "nonfinite": float((~differences.isfinite()).double().mean()),
            }
    exact = _normal(y, torch.tensor(exact_mean, dtype=torch.float64), VARIANCE + spread)
    for name, dtype in (("ours", torch.float32), ("ours, float64", torch.float64)):
        log = by_the_library(Draws(n, seed, dtype), mean, y)
        found[name] = {"error": _largest(log - exact), "kl": divergence(y, exact, log)}
    return found


def by_the_library(rows: Draws, mean: float, y: Tensor) -> Tensor:
    """log p(y|D) of a network of the rows' dtype."""
    model = nn.Linear(1, 1, bias=False).to(rows.dtype)
    nn.init.constant_(model.weight, mean)
    prior = ssla.priors.Gaussian(precision=1 / PRIOR_VARIANCE, mean=PRIOR_MEAN)
    noise = ssla.likelihoods.Gaussian(noise=math.sqrt(VARIANCE))
    posterior = ssla.fit(model.eval(), rows, likelihood=noise, prior=prior, mode="polish")
    marginal = posterior.outputs_at(torch.ones(1, 1, dtype=rows.dtype))
    return ssla.predictive.from_marginal(posterior.likelihood, *marginal).log_prob(y[None])[0]


def by_subtraction(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ASSLA as published: ℓ(θ̂; x, y) − ℓ(θ̂; x) − ½ [log J̃ − log J], every sum in x's dtype;
    its last term alone; and the difference of the two sums alone.
    """
    mean = x.mean()
    n = torch.tensor(float(len(x)), dtype=x.dtype)
    terms = _normal(x, mean, VARIANCE)
    whole = terms.sum()
    augmented = whole + _normal(y, mean, VARIANCE)
    curvature = -0.5 * (torch.log((n + 1) / VARIANCE) - torch.log(n / VARIANCE))
    differences = augmented - whole
    return (differences + curvature).double(), curvature.double(), differences.double()


def _normal(y: Tensor, mean: Tensor, variance: float) -> Tensor:
    return -0.5 * ((y - mean) ** 2 / variance + math.log(2 * math.pi * variance))


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def divergence(y: Tensor, reference: Tensor, other: Tensor) -> float:
    """KL of two log densities on an even grid, each normalised on it."""
    step = float(y[1] - y[0])
    p, q = (log - torch.logsumexp(log, 0) - math.log(step) for log in (reference, other))
    return float((p.exp() * (p - q)).sum() * step)


@dataclass(frozen=True)
class Precision:
    name = "precision"
    title = "Intermediate regime (the table of numerical error)"

    def tasks(self, quick: bool) -> list[Task]:
        sizes, runs = ((100_000, 1_000_000), 2) if quick else (SIZES, RUNS)
        cases = [(n, seed) for n in sizes for seed in range(runs)] + (
            [] if quick else [(n, 0) for n in LARGER]
        )
        return [Task(f"{n}-{seed}", one, {"n": n, "seed": seed}, edition=3) for n, seed in cases]

    def report(self, records: Mapping[str, Record], folder: Path) -> list[Claim]:
        rows: list[list[Cell]] = []
        sizes = sorted({record["n"] for record in records.values()})
        for n in sizes:
            here = [record for record in records.values() if record["n"] == n]
            single, double = (_mean(here, name, "error") for name in ("float32", "float64"))
            kl, ours = (
                _mean(here, "float32", "kl"),
                [_mean(here, name, "error") for name in ("ours", "ours, float64")],
            )
            rows.append(
                [
                    f"{n:,}",
                    len(here),
                    *_published(n),
                    single,
                    _mean(here, "float32", "curvature"),
                    double,
                    kl,
                    *ours,
                    _mean(here, "float32", "zero"),
                    _mean(here, "float32", "nonfinite"),
                ]
            )
        columns = [
            "n",
            "runs",
            "max error published",
            "KL published",
            "max error, float32",
            "of it curvature",
            "float64",
            "KL",
        ]
        columns += ["ours, float32 rows", "ours, float64 rows", "share zero", "not finite"]
        caption = (
            "Largest error of the log density: ASSLA by subtracting two sums, and how much of it "
            "is in the curvature term alone; the library's predictive, against the exact one. KL: "
            "of the float32 subtraction, on 201 points within four standard deviations, each "
            "density normalised there; the published grid is not given. The last two: shares of "
            "float32 differences that are zero or not finite, published as 0.00 throughout."
        )
        formats = dict.fromkeys(columns[4:10], ".2e") | dict.fromkeys(columns[10:], ".2f")
        Table("precision", caption, columns, rows, formats).write(folder)
        _figure(sizes, rows, folder)
        return self._claims(rows)

    @staticmethod
    def _claims(rows: list[list[Cell]]) -> list[Claim]:
        known = [
            (PUBLISHED[n], row)
            for row in rows
            if (n := int(str(row[0]).replace(",", ""))) in PUBLISHED
        ]
        worst, apart = (
            max(abs(float(str(row[at])) / said[k][0] - 1) for said, row in known)
            for at, k in ((4, 1), (7, 0))
        )
        curvature, doubles = (max(float(str(row[at])) for _, row in known) for at in (5, 6))
        least = min(float(str(row[4])) for _, row in known)
        ours = max(float(str(value)) for row in rows for value in row[8:10])
        errors = [float(str(row[4])) for _, row in known]
        odd = max(float(str(value)) for _, row in known for value in row[10:])
        return [
            Claim(
                "float32 subtraction gives the published errors (half the spacing of float32 "
                "numbers near ℓ)",
                "7.6e-3 to 5.9e-2",
                f"within {100 * worst:.1f}% of every published error",
                worst < 0.15,
                kind=REPEATED,
            ),
            Claim(
                "float32 subtraction gives the published KL (within 15%)",
                "9.4e-6 to 4.8e-4",
                f"within {100 * apart:.0f}%",
                apart < 0.15,
                "The KL depends on the grid of y, which is not given.",
                kind=REPEATED,
            ),
            Claim(
                "No float32 difference is zero or not finite",
                "0.00 in every row",
                f"largest share {odd:.2f}",
                odd == 0,
                kind=REPEATED,
            ),
            Claim(
                "float64 subtraction has an error of 1e-11 to 1e-10",
                "1e-11 to 1e-10",
                f"at most {doubles:.1e}",
                doubles < 1e-9,
                kind=REPEATED,
            ),
            Claim(
                "The error of ASSLA grows gradually from n = 100,000 to n = 1,000,000",
                "gradual rather than abrupt",
                f"from {errors[0]:.1e} to {errors[-1]:.1e}, in steps by powers of two",
                all(later > 0.9 * earlier for earlier, later in itertools.pairwise(errors))
                and errors[-1] > 2 * errors[0],
                number="5",
            ),
            Claim(
                "The error of float32 is primarily caused by subtracting two sums of ℓ",
                "a footnote; one sentence of the text names the curvature term",
                f"the error is at most {curvature:.0e} in the curvature term, at least "
                f"{least:.0e} in total",
                curvature < 1e-3 * least,
                number="5",
            ),
            Claim(
                "The library's predictive, which subtracts no such sums, has no such error",
                "not stated",
                f"at most {ours:.0e}, for every n and also from float32 rows",
                ours < 1e-6,
                kind=OURS,
            ),
        ]


def _published(n: int) -> tuple[str | None, str | None]:
    """Largest error and KL, mean ± standard deviation."""
    if n not in PUBLISHED:
        return None, None
    (kl, kl_spread), (error, error_spread) = PUBLISHED[n]
    return f"{error:.2e} ± {error_spread:.1e}", f"{kl:.2e} ± {kl_spread:.1e}"


def _mean(records: list[Record], name: str, what: str) -> float | None:
    values = [record[name][what] for record in records if name in record]
    return sum(values) / len(values) if values else None


def _figure(sizes: list[int], rows: list[list[Cell]], folder: Path) -> None:
    """Errors against n, and half the spacing of float32 numbers near ℓ ≈ −1.77 n."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.6))
    n = torch.logspace(math.log10(min(sizes)), 6.1, 400, dtype=torch.float64)
    size = 0.5 * (1 + math.log(2 * math.pi * VARIANCE)) * n
    spacing = 2 ** (torch.log2(size).floor() - 23) / 2
    axis.plot(n, spacing, color="grey", lw=1, label="half the spacing of float32 at ℓ")
    axis.plot(
        *zip(*((n, error) for n, (_, (error, _)) in PUBLISHED.items()), strict=True),
        "x",
        label="published",
    )
    for column, label, mark in (
        (4, "float32 sums", "o"),
        (5, "of it curvature", "v"),
        (6, "float64 sums", "s"),
        (8, "ours, float32 rows", "^"),
    ):
        known = [
            (size, row[column])
            for size, row in zip(sizes, rows, strict=True)
            if row[column] is not None
        ]
        axis.plot(*zip(*known, strict=True), mark, mfc="none", label=label)
    axis.set(xscale="log", yscale="log", xlabel="n", ylabel="largest error of log p(y)")
    axis.legend(fontsize=8)
    draw(figure, folder, "precision")
