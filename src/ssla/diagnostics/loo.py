"""Leave-one-out predictions of the training rows: by cavities (`ssla.predictive.cavities`), without
refits.

Cavities are exact for a linear model with Gaussian noise. For other likelihoods they are too
optimistic for influential rows; in a last layer these are refitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import all_in_plain_torch, warn
from ssla._checks import level as checked_level
from ssla.curvature.jacobians import Features
from ssla.fitting.again import fit_again
from ssla.fitting.passes import Chunk
from ssla.likelihoods import Likelihood
from ssla.predictive.cavities import Site, Sites, cavity, collect, predictives_of, ranks
from ssla.priors import EXACT
from ssla.report import POLISH
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

INFLUENTIAL = 0.1  # nats: the error of a cavity grows with it (benchmarks/leave_one_out.py)
# at most this many rows are read for refits in each round, unless the user says otherwise
ROWS_TO_REFIT = 200_000
LEVELS = (0.5, 0.9, 0.95)


@all_in_plain_torch
@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """Each training row predicted from the others, in the order in which the data are read.

    Made by `posterior.loo()`.

    A row of weight w stands for w equal rows: one of them is left out (all of it, if w < 1).
    """

    kind: str  # of the target, as `Predictive.kind`
    log_prob: Tensor  # log p(y_i | the other rows) (n,); NaN where there is no answer
    # P(Y < y_i) (n,), or (n, D) for D targets; for classes the probability of all classes that are
    # more probable
    lower: Tensor
    upper: Tensor  # P(Y ≤ y_i), the same for numbers; for classes with that of y_i itself
    inaccurate: Tensor  # (n,) bool: rows whose predictive could not be integrated to its tolerance
    # KL divergence (n,) of the Gaussian without the row from that with it; infinite: there is none
    # without it
    influence: Tensor
    refitted: Tensor  # (n,) bool: rows for which the Gaussian was refitted
    weights: Tensor  # of the rows (n,)

    @property
    def pit(self) -> Tensor | None:
        """P(Y ≤ y_i) (n,) or (n, D): uniform if the model is right. Classes have none.

        Of counts the middle of P(Y < y_i) and P(Y ≤ y_i). Of angles the circle is cut opposite the
        mean.
        """
        return None if self.kind == "class" else (self.lower + self.upper) / 2

    @property
    def failed(self) -> Tensor:
        """(n,) bool: rows without an answer. They are left out of `nll` and `coverage`."""
        return self.log_prob.isnan()

    @property
    def doubtful(self) -> Tensor:
        """(n,) bool: influential rows that were not refitted. Their log densities are too high."""
        return (self.influence > INFLUENTIAL) & ~self.refitted & ~self.failed

    @cached_property
    def nll(self) -> float:
        """The mean of −log p(y_i | the other rows), by row weight."""
        return -self._mean(self.log_prob)

    def coverage(self, level: float = 0.95) -> float:
        """The share of rows, by weight, whose central interval (for classes: smallest set) at
        that level contains y.
        """
        tail = (1 - checked_level(level)) / 2
        inside = (
            self.lower < level
            if self.kind == "class"
            else (self.upper >= tail) & (self.lower <= 1 - tail)
        )
        return self._mean(inside.double() if inside.dim() == 1 else inside.double().mean(1))

    def _mean(self, values: Tensor) -> float:
        weights = self.weights.masked_fill(self.failed, 0.0)
        return float((weights * values.nan_to_num()).sum() / weights.sum())

    def __str__(self) -> str:
        shares = ", ".join(f"{self.coverage(level):.3f} at {level:g}" for level in LEVELS)
        failed, doubtful = int(self.failed.sum()), int(self.doubtful.sum())
        lines = [
            f"leave-one-out   {len(self.log_prob):,} rows, each predicted from the others",
            f"nll             {self.nll:.4g}",
            f"coverage        {shares}",
            f"refitted        {int(self.refitted.sum()):,} rows; the others follow from the fit",
            *(
                [f"doubtful        {doubtful:,} influential rows that were not refitted"]
                if doubtful
                else []
            ),
            *(
                [f"no answer       {failed:,} rows, which are left out of these figures"]
                if failed
                else []
            ),
            "note            If the network was trained on these rows, its features have seen "
            "them, and these figures are optimistic.",
        ]
        return "\n".join(lines)


# --- answers -------------------------------------------------------------------------------


class Answer(NamedTuple):
    """See `LeaveOneOut`."""

    log_prob: Tensor
    lower: Tensor
    upper: Tensor
    inaccurate: Tensor


def leave_one_out(posterior: Posterior, data: Any = None, refits: int | None = None) -> LeaveOneOut:
    """Every training row predicted from the others, by cavities; see Posterior.loo.

    The most influential rows of a last layer are refitted. ValueError for another convention than
    the exact one, and for data that are not those of the fit.
    """
    if posterior.convention != EXACT:
        raise ValueError(
            "loo() works with the exact convention only, but this posterior has "
            f"convention={posterior.convention!r}. Use posterior.with_prior(posterior.prior).loo()."
        )
    if refits is not None and (
        isinstance(refits, bool) or not isinstance(refits, int) or refits < 0
    ):
        raise ValueError(f"refits must be a whole number from 0, or None, but is {refits!r}.")
    sites = collect(posterior, data)
    parts, influences, weights = [], [], []
    for site in sites:
        without = cavity(site, None, posterior.covariance)
        parts.append(_answer(sites.likelihood, without.marginal, site.y))
        influences.append(without.influence)
        weights.append(site.row_weights)
    answer, influence = Answer(*map(torch.cat, zip(*parts, strict=True))), torch.cat(influences)
    bad = influence.isinf()
    for values in answer[:3]:
        values[bad] = torch.nan
    refitted = torch.zeros_like(bad)
    most = max(ROWS_TO_REFIT // len(bad), 1) if refits is None else refits
    found = list(_refits(posterior, sites, _worst(posterior, influence, most)))
    if found:
        rows, f, K, y = (torch.cat(column) for column in zip(*found, strict=True))
        for values, own in zip(answer, _answer(sites.likelihood, Marginal(f, K), y), strict=True):
            values[rows] = own
        refitted[rows] = True
    _warn(bad & ~refitted, answer.inaccurate)
    kind = posterior.likelihood.predictive.support_for(posterior.network.outputs).kind
    return LeaveOneOut(kind, *answer, influence, refitted, torch.cat(weights))


def _warn(failed: Tensor, inaccurate: Tensor) -> None:
    if bool(inaccurate.any()):
        warn(
            f"{int(inaccurate.sum())} of {len(inaccurate)} leave-one-out predictives are "
            "inaccurate: their density has no integral, or a spike that could not be resolved. "
            "See loo().inaccurate."
        )
    if bool(failed.any()):
        warn(
            f"loo() has no answer for {int(failed.sum())} of {len(failed)} rows (NaN): their "
            "share of the fit cannot be removed from it, and they were not refitted. Refits need "
            "a last layer that was polished or has a variational Gaussian, rows that fit a "
            "quarter of the memory budget, and a large enough refits=. Likely cause: "
            "structure='diag' or 'kfac' describes these rows badly. Use structure='dense'.",
            RuntimeWarning,
        )


def _worst(posterior: Posterior, influence: Tensor, most: int) -> list[int]:
    """The rows to refit, the most influential first: none but those without a cavity where
    cavities are exact.
    """
    least = torch.finfo(influence.dtype).max if posterior.quadratic else INFLUENTIAL
    order = influence.argsort(descending=True, stable=True)
    return [row for row in order[:most].tolist() if float(influence[row]) > least]


def _refits(
    posterior: Posterior, sites: Sites, wanted: list[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Row, f and K of the same Gaussian fitted without that row, and y.

    Only a last layer has them.
    """
    kept = sites.rows.kept
    movable = posterior.variational is not None or posterior.mode == POLISH
    if not posterior.network.linear or kept is None or not movable:
        return
    chunks = [_chunk(site, posterior) for site in kept]
    starts = torch.tensor([0, *(len(site.f) for site in kept)]).cumsum(0)
    for row in wanted:
        part = int(torch.searchsorted(starts, row, right=True)) - 1
        at = row - int(starts[part])
        site, less = kept[part], kept[part].row_weights.clone()
        less[at] -= less[at].clamp_max(1.0)
        rest = [
            replace(chunk, weights=less) if k == part else chunk for k, chunk in enumerate(chunks)
        ]
        try:
            other = fit_again(posterior, rest)
        except ValueError:  # without this row there is no mode, or no positive definite curvature
            continue
        assert isinstance(site.J, Features)
        J = replace(site.J, phi=site.J.phi[at : at + 1])
        f = site.f[at : at + 1] + J.push(other.mean - sites.mean)
        yield torch.tensor([row]), f, other.covariance.covariance(J), site.y[at : at + 1]


def _chunk(site: Site, posterior: Posterior) -> Chunk:
    assert isinstance(site.J, Features)
    return Chunk(None, site.y, site.weights, 0.0, site.J, posterior.network.offset)


def _answer(likelihood: Likelihood, marginal: Marginal, y: Tensor) -> Answer:
    """Of y under the predictives of f ~ N(f₋, K₋)."""
    parts = [
        Answer(
            predictive.log_prob(some), *ranks(predictive, some), predictive.diagnostics.inaccurate
        )
        for predictive, some in predictives_of(likelihood, marginal, y)
    ]
    return Answer(*map(torch.cat, zip(*parts, strict=True)))
