"""Leave-one-out predictions of the training rows, by cavities (`ssla.predictive.cavities`).

The terms:

    site       what a row contributes to the fit: gradient and precision of its log likelihood in
               the outputs
    cavity     the Gaussian of a row's outputs when its own site is removed from the fit
    influence  the KL divergence of the cavity from the Gaussian with the row

Cavities need no refit. They are exact for a linear model with Gaussian noise. For other likelihoods
they are too optimistic for influential rows. In a last layer the Gaussian is refitted without each
of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import all_in_plain_torch, warn
from ssla._checks import check_level as checked_level
from ssla.curvature.jacobians import Features
from ssla.fitting.further_passes import refit_to_chunks
from ssla.fitting.passes import Chunk
from ssla.likelihoods import Likelihood
from ssla.predictive.cavities import (
    Site,
    Sites,
    collect_sites,
    compute_cavity,
    iterate_predictives,
    rank_targets,
)
from ssla.priors import EXACT
from ssla.report import POLISH
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

INFLUENTIAL = (
    0.1  # nats: the error of a cavity grows with it (benchmarks/accuracy/leave_one_out.py)
)
# at most this many rows are read for refits in each round, unless the user says otherwise; a guess
ROWS_TO_REFIT = 200_000
LEVELS = (0.5, 0.9, 0.95)  # of the coverage that is printed


@all_in_plain_torch
@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """The prediction of each training row from the others, in the order in which the data are read.

    Made by `posterior.loo()`. A row of weight w stands for w equal rows: one of them is left out
    (all of it, if w < 1).
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
        """Return P(Y ≤ y_i) (n,) or (n, D), which is uniform if the model is right.

        The result is None for classes. For counts it is the mean of P(Y < y_i) and P(Y ≤ y_i). For
        angles the circle is cut opposite the mean.
        """
        return None if self.kind == "class" else (self.lower + self.upper) / 2

    @property
    def failed(self) -> Tensor:
        """Return flags (n,) bool of the rows without an answer.

        `nll` and `coverage` leave these rows out.
        """
        return self.log_prob.isnan()

    @property
    def doubtful(self) -> Tensor:
        """Return flags (n,) bool of the influential rows that were not refitted.

        The log densities of these rows are too high.
        """
        return (self.influence > INFLUENTIAL) & ~self.refitted & ~self.failed

    @cached_property
    def nll(self) -> float:
        """Return the mean of −log p(y_i | the other rows), by row weight.

        Rows without an answer are left out.
        """
        return -self._compute_weighted_mean(self.log_prob)

    def coverage(self, level: float = 0.95) -> float:
        """Return the share of rows, by weight, whose central interval at that level contains y.

        For classes it is the smallest set. A row with several targets counts by the share of
        targets that are inside. Raises ValueError unless 0 < level < 1.
        """
        tail = (1 - checked_level(level)) / 2
        if self.kind == "class":
            inside = self.lower < level
        else:
            inside = (self.upper >= tail) & (self.lower <= 1 - tail)
        covered = inside.double()
        return self._compute_weighted_mean(covered if covered.dim() == 1 else covered.mean(1))

    def _compute_weighted_mean(self, values: Tensor) -> float:
        """Return the mean of values (n,) by row weight, over the rows with an answer."""
        weights = self.weights.masked_fill(self.failed, 0.0)
        return float((weights * values.nan_to_num()).sum() / weights.sum())

    def __str__(self) -> str:
        """Return the scores and the numbers of rows of each kind as text, one a line."""
        shares = ", ".join(f"{self.coverage(level):.3f} at {level:g}" for level in LEVELS)
        failed = int(self.failed.sum())
        doubtful = int(self.doubtful.sum())
        lines = [
            f"leave-one-out   {len(self.log_prob):,} rows, each predicted from the others",
            f"nll             {self.nll:.4g}",
            f"coverage        {shares}",
            f"refitted        {int(self.refitted.sum()):,} rows; the others follow from the fit",
        ]
        if doubtful:
            lines.append(f"doubtful        {doubtful:,} influential rows that were not refitted")
        if failed:
            lines.append(f"no answer       {failed:,} rows, which are left out of these figures")
        lines.append(
            "note            If the network was trained on these rows, its features have seen "
            "them, and these figures are optimistic."
        )
        return "\n".join(lines)


# --- answers -------------------------------------------------------------------------------


class _RowAnswers(NamedTuple):
    """The answers for n rows; the fields are those of `LeaveOneOut`."""

    log_prob: Tensor
    lower: Tensor
    upper: Tensor
    inaccurate: Tensor


def leave_one_out(posterior: Posterior, data: Any = None, refits: int | None = None) -> LeaveOneOut:
    """Predict every training row from the others, by cavities; see Posterior.loo.

    data: the training rows; None: those that the posterior keeps. The Gaussian of a last layer is
    refitted without each of the most influential rows, `refits` of them at most; None: as many as
    read ROWS_TO_REFIT rows in a round. Warns of inaccurate rows and of rows without an answer.
    Raises ValueError for another convention than the exact one, for a wrong `refits`, and for data
    that are not those of the fit.
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

    sites = collect_sites(posterior, data)
    answers = []
    influences = []
    weights = []
    for site in sites:
        without = compute_cavity(site, None, posterior.covariance)
        answers.append(_predict_rows(sites.likelihood, without.marginal, site.y))
        influences.append(without.influence)
        weights.append(site.row_weights)

    answer = _RowAnswers(*map(torch.cat, zip(*answers, strict=True)))
    influence = torch.cat(influences)

    # Rows without a cavity have no answer, unless they are refitted.
    failed = influence.isinf()
    for values in (answer.log_prob, answer.lower, answer.upper):
        values[failed] = torch.nan
    most = max(ROWS_TO_REFIT // len(failed), 1) if refits is None else refits
    rows = _choose_rows_to_refit(posterior, influence, most)
    refitted = _replace_by_refits(answer, list(_refit_without_rows(posterior, sites, rows)), sites)
    _warn_of_bad_rows(failed & ~refitted, answer.inaccurate)
    support = posterior.likelihood.predictive.support_for(posterior.network.outputs)
    return LeaveOneOut(support.kind, *answer, influence, refitted, torch.cat(weights))


def _replace_by_refits(answer: _RowAnswers, refits: list[_RefitRow], sites: Sites) -> Tensor:
    """Replace the answers of refitted rows in `answer`, in place, and return their flags (n,) bool.

    sites: those of the fit, for the likelihood. Without refits nothing changes.
    """
    refitted = torch.zeros(len(answer.log_prob), dtype=torch.bool)
    if refits:
        rows = torch.tensor([refit.row for refit in refits])
        f = torch.cat([refit.f for refit in refits])
        K = torch.cat([refit.K for refit in refits])
        y = torch.cat([refit.y for refit in refits])
        better = _predict_rows(sites.likelihood, Marginal(f, K), y)
        for values, better_values in zip(answer, better, strict=True):
            values[rows] = better_values
        refitted[rows] = True

    return refitted


def _warn_of_bad_rows(failed: Tensor, inaccurate: Tensor) -> None:
    """Warn of rows whose predictive is inaccurate, and of rows without an answer, (n,) bool.

    failed: those without an answer.
    """
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


def _choose_rows_to_refit(posterior: Posterior, influence: Tensor, most: int) -> list[int]:
    """Choose the rows to refit by their influence (n,), at most `most`, the most influential first.

    A row without a cavity has infinite influence. Only such rows are chosen where cavities are
    exact.
    """
    least = torch.finfo(influence.dtype).max if posterior.quadratic else INFLUENTIAL
    order = influence.argsort(descending=True, stable=True)
    return [row for row in order[:most].tolist() if float(influence[row]) > least]


class _RefitRow(NamedTuple):
    """A training row with its outputs under the Gaussian that was fitted without it."""

    row: int  # its place among the training rows
    f: Tensor  # mean of the outputs (1, C)
    K: Tensor  # their covariance (1, C, C)
    y: Tensor  # (1,) or (1, D)


def _refit_without_rows(posterior: Posterior, sites: Sites, rows: list[int]) -> Iterator[_RefitRow]:
    """Fit the Gaussian again without each of the rows, and yield the row's outputs under it.

    Only a last layer is refitted, whose sites are in memory and whose mode moves with the data;
    otherwise nothing is yielded. A row without which there is no fit is left out.
    """
    kept = sites.rows.kept
    mode_moves = posterior.variational is not None or posterior.mode == POLISH
    if not posterior.network.linear or kept is None or not mode_moves:
        return
    chunks = [_make_chunk(site, posterior) for site in kept]

    # the number of the first row of each chunk
    starts = torch.tensor([0, *(len(site.f) for site in kept)]).cumsum(0)
    for row in rows:
        chunk_number = int(torch.searchsorted(starts, row, right=True)) - 1
        site = kept[chunk_number]
        i = row - int(starts[chunk_number])  # the place of the row in its chunk

        # A row of weight w stands for w equal rows, of which one is left out (all of it if w < 1).
        weights = site.row_weights.clone()
        weights[i] -= weights[i].clamp_max(1.0)
        chunks_without_row = [*chunks]
        chunks_without_row[chunk_number] = replace(chunks[chunk_number], weights=weights)
        try:
            refit = refit_to_chunks(posterior, chunks_without_row)
        except ValueError:  # without this row there is no mode, or no positive definite curvature
            continue

        # The outputs of the row follow from the step of the mean, because they are linear in the
        # last layer.
        assert isinstance(site.J, Features)
        J = replace(site.J, phi=site.J.phi[i : i + 1])
        f = site.f[i : i + 1] + J.push(refit.mean - sites.mean)
        yield _RefitRow(row, f, refit.covariance.covariance(J), site.y[i : i + 1])


def _make_chunk(site: Site, posterior: Posterior) -> Chunk:
    """Return the rows of a site of a last layer as a chunk of a fit.

    The chunk has features in place of inputs.
    """
    assert isinstance(site.J, Features)
    return Chunk(
        x=None,
        y=site.y,
        weights=site.weights,
        rounding=0.0,
        features=site.J,
        offset=posterior.network.offset,
    )


def _predict_rows(likelihood: Likelihood, marginal: Marginal, y: Tensor) -> _RowAnswers:
    """Return how the predictives of f ~ N(f₋, K₋) predict y (n,) or (n, D).

    marginal: f₋ (n, C) and K₋ (n, C, C).
    """
    answers = []
    for predictive, targets in iterate_predictives(likelihood, marginal, y):
        lower, upper = rank_targets(predictive, targets)
        log_prob = predictive.log_prob(targets)
        answers.append(_RowAnswers(log_prob, lower, upper, predictive.diagnostics.inaccurate))
    return _RowAnswers(*map(torch.cat, zip(*answers, strict=True)))
