"""Explanations of the uncertainty of predictions, without refits.

An explanation says how training rows, inputs, noise and prior contribute to the uncertainty, or
which row to label next. The terms:

    doubt   the epistemic variance of a prediction: what uncertain weights add to that of y
    noise   the aleatoric variance: that of y with known weights
    site    what training row i contributes to the Gaussian of θ: the gradient g (C,) of its log
            likelihood in its outputs f (C,), and the precision Λ (C, C) (see `leave_one_out`)
    query   inputs x whose prediction is explained
    J, S    the Jacobian of the outputs in θ, (C, P) for each input, and the covariance of θ (P, P)

With X = J_x S J_iᵀ (C, C), K = J_i S J_iᵀ = R Rᵀ and M = I − RᵀΛR, the outputs at x without the
site of row i have

    f_x − X a        a = (I − ΛK)⁻¹ g = g + ΛR M⁻¹Rᵀg     X a: what the row adds to the mean
    K_x + X W Xᵀ     W = Λ(I − KΛ)⁻¹ = Λ + ΛR M⁻¹RᵀΛ      X W Xᵀ: what it takes from the variance

The row also moves the outputs of every other row j, by J_j S J_iᵀa, and with them Λ_j, unless the
noise is Gaussian. To first order this adds −aᵀJ_i S v to a variance cᵀSc (c a row of J_x), with v =
Σ_j J_jᵀt_j and t_j the gradient in f of (J_j S c)ᵀΛ_j(f)(J_j S c): one more pass for all i. For
classes it is as large as the first term.

The next order has two parts of opposite sign. The row's own term (j = i) leaves with the row. And
without the row S is S₀ = S + S J_iᵀW J_i S, so that J_j S c of its neighbours is larger by (J_j S
J_iᵀ)W(J_i S c): a sum over all pairs of rows, which is not made. No constant can replace it: for
one parameter and n equal rows both parts together are −1 times the own term, for rows that share no
parameter the pairs vanish and they are +1 times. `OWN` takes a half out, which is an approximation
and not a derived value: it is nearer to refits than none of it, and in most cases than all of it.
Mean error of the variance relative to refits without each row (Laplace, 60 rows, linear, prior
precision 1; the first three columns are a test):

    columns, likelihood     none     half     all      with the sum over pairs
    4, three classes        .137     .125     .136     .108
    10, three classes       .283     .203     .166     .139
    4, counts               .071     .063     .071     .033
    12, counts              .103     .081     .086     .026

Labelling a row adds a site with the Fisher information Λ = L Lᵀ, for whatever y is observed, and
takes X Q Xᵀ from K_x, with Q = L(I + LᵀKL)⁻¹Lᵀ. Mean, variance and label gains are exact for a
linear model with Gaussian noise.

A row also changes the widths over which a variational Gaussian averages the g and Λ of every row;
this is not followed. Against refits of digits (300 rows, ten classes) the rank correlation is 0.997
(mean) and 0.994 (variance) for Laplace, 0.961 and 0.958 for variational, on average over inputs and
outputs (lowest: docs/pictures.md).

X needs S J_xᵀ, one solve for each query and output, which every structure has. Queries are taken a
few at a time, and training rows in chunks, by the memory budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import check_finite, check_name, warn
from ssla.curvature import Operator
from ssla.curvature.jacobians import Jacobian
from ssla.data import Inputs, as_inputs, as_tensor, row_count, take_rows
from ssla.likelihoods import Likelihood
from ssla.likelihoods.averages import averages
from ssla.maths.linalg import covariance_root
from ssla.predictive import predict
from ssla.predictive.cavities import LEAST, Site, Sites, collect_sites, uses_expected_fisher
from ssla.priors import EXACT
from ssla.refit.prior_response import prior_response
from ssla.refit.weights.refit_rows import DataPurpose, open_training_data
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

PURPOSE = DataPurpose("ssla.explain", "The data", "ssla.explain(posterior, x, data={})")
MEAN, VARIANCE = "mean", "variance"
SHOWN = 3  # queries that are printed, and rows and inputs of each
# of a standard deviation of f, for central differences of what autograd cannot follow; a guess
STEP = 0.01
# the share of a row's own term that is taken out: not derived but measured, see above and
# tests/diagnostics/test_explanations.py
OWN = 0.5
# training rows in a chunk; with fewer rows, more queries fit the memory in one pass; a guess
ROWS_AT_ONCE = 1024
VARIANTS = 4096  # inputs with one changed column that are evaluated together; a guess
TINY = torch.finfo(torch.float64).tiny


class Influence(NamedTuple):
    """The training rows with the most influence on the outputs f at each of N inputs.

    Each input has k such rows, the most influential first.
    """

    rows: Tensor  # (N, k): their places in the order in which the data are read, from 0
    mean: Tensor  # what the row adds to f (N, k, C): f with the row less f without it
    # what the row adds to the variance of f (N, k, C): below zero where it reduces the variance
    variance: Tensor


class Split(NamedTuple):
    """The variance of y = noise + doubt, each of the shape of `predictive.variance`.

    doubt = J H⁻¹ (data + prior) H⁻¹ Jᵀ, and `prior` is its second term. Without data this is all of
    the doubt, and with many data it vanishes. It is also how fast the doubt falls when the log
    precision of the prior rises. If the mean of y is not linear in f, it is the doubt times the
    prior's share of the first-order terms. A prior that is not log-concave may make it negative.
    """

    noise: Tensor
    doubt: Tensor
    prior: Tensor  # part of the doubt


@dataclass(frozen=True, eq=False)
class Explanation:
    """The reasons for the uncertainty of the predictions at N inputs. Made by `ssla.explain`."""

    marginal: Marginal  # the outputs: mean f̂ (N, C), covariance K (N, C, C)
    influence: Influence
    split: Split
    # (N, D): the doubt less the doubt with this input at its reference; None: x is not a table of
    # numbers
    inputs: Tensor | None
    reference: Tensor | None  # (D,)
    # (n,) bool: training rows whose share of the fit cannot be removed from it; they are left out
    failed: Tensor

    def __str__(self) -> str:
        """Return the explanations of the first SHOWN inputs as text."""
        count = min(len(self.marginal.mean), SHOWN)
        return "\n".join(line for i in range(count) for line in self._describe_input(i))

    def _describe_input(self, i: int) -> list[str]:
        """Return the lines of text that explain the prediction at input i."""
        # Several values of y are summed.
        noise, doubt, prior = (float(term[i].sum()) for term in self.split)
        lines = [
            f"input {i}",
            f"  variance   {noise + doubt:.4g} = noise {noise:.4g} + doubt {doubt:.4g}, of which "
            f"the prior decides {prior:.4g}",
            *self._describe_rows(i),
        ]
        if self.inputs is not None:
            effects = self.inputs[i]
            largest = effects.abs().argsort(descending=True, stable=True)[:SHOWN].tolist()
            listed = ", ".join(f"{j}: {float(effects[j]):+.3g}" for j in largest)
            lines.append(f"  inputs     {listed} of the doubt")

        return lines

    def _describe_rows(self, i: int) -> list[str]:
        """Return a line of text for each of the SHOWN most influential training rows at input i.

        Only the first line has the label "rows".
        """
        rows = self.influence.rows[i][:SHOWN].tolist()
        means = self.influence.mean[i][:SHOWN].tolist()
        variances = self.influence.variance[i][:SHOWN].tolist()

        lines: list[str] = []
        for row, mean, variance in zip(rows, means, variances, strict=True):
            label = "" if lines else "rows"
            lines.append(
                f"  {label:<9}  row {row} moves f by {_format_numbers(mean)} and its variance by "
                f"{_format_numbers(variance)}"
            )

        return lines


def _format_numbers(values: list[float]) -> str:
    """Return the numbers of the first SHOWN outputs as text, in brackets if there are several."""
    shown = ", ".join(f"{value:+.3g}" for value in values[:SHOWN])
    return shown if len(values) == 1 else f"({shown}{', …' * (len(values) > SHOWN)})"


@dataclass(frozen=True, eq=False)
class LabelGains:
    """The gains from a label for each of the M rows of a pool. Made by `ssla.label_next`."""

    gain: Tensor  # (M,): by how much the mean doubt at the targets falls when this row is labelled
    doubt: float  # the mean doubt at the targets now, summed over the outputs

    @property
    def order(self) -> Tensor:
        """Return the rows of the pool (M,), from the largest gain to the least."""
        return self.gain.argsort(descending=True, stable=True)

    @property
    def best(self) -> int:
        """Return the row of the pool to label next, that of the largest gain."""
        return int(self.gain.argmax())


def explain(
    posterior: Posterior,
    x: Inputs,
    top: int | None = 10,
    by: str = MEAN,
    reference: Any = None,
    data: Any = None,
) -> Explanation:
    """Explain the uncertainty of the predictions at x; see ssla.explain for arguments and errors.

    Warns of training rows that cannot be removed from the fit.
    """
    _check_posterior(posterior, "ssla.explain")
    check_name("by", by, (MEAN, VARIANCE))
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise ValueError(
            f"top must be a whole number from 1, or None for all rows, but is {top!r}."
        )

    x = as_inputs(x)
    if row_count(x) == 0:
        raise ValueError("x has no rows. Give at least one input to explain.")

    # The reference is checked before the long pass over the training rows.
    reference_row = _choose_reference(posterior, x, reference, data)
    influence, failed = _measure_influence(posterior, x, top, by, data)
    if bool(failed.any()):
        warn(
            f"ssla.explain leaves out {int(failed.sum())} of {len(failed)} training rows: their "
            "share of the fit cannot be removed from it. Likely cause: structure='diag' or "
            "'kfac' describes these rows badly. Use structure='dense'.",
            RuntimeWarning,
        )

    marginal = posterior.outputs_at(x)
    split = _split_variance(posterior, x, marginal)
    inputs = None
    if reference_row is not None:
        inputs = _compute_input_effects(posterior, x, reference_row)
    return Explanation(marginal, influence, split, inputs, reference_row, failed)


def _split_variance(posterior: Posterior, x: Inputs, marginal: Marginal) -> Split:
    """Split the variance of y at x into noise, doubt and the prior's part of the doubt.

    marginal: f̂ (N, C) and K (N, C, C) at x.
    """
    law = predict(posterior, x).law
    doubt = law.epistemic
    A = compute_mean_slopes(posterior.likelihood.predictive, *marginal)
    by_prior = compute_first_order_variance(A, prior_response(posterior, x).covariance)
    share = by_prior / compute_first_order_variance(A, marginal.covariance)
    # 0/0 where y does not depend on θ: the prior's part is zero.
    prior = doubt * share.nan_to_num(0.0, 0.0, 0.0).reshape(doubt.shape)
    return Split(law.aleatoric, doubt, prior)


def label_next(posterior: Posterior, pool: Inputs, targets: Inputs = None) -> LabelGains:
    """Compute by how much a label for each row of the pool reduces the doubt at the targets.

    See ssla.label_next for arguments and errors.
    """
    _check_posterior(posterior, "ssla.label_next")
    pool = as_inputs(pool)
    targets = pool if targets is None else as_inputs(targets)
    for name, count in (("pool", row_count(pool)), ("targets", row_count(targets))):
        if count == 0:
            raise ValueError(f"{name} has no rows. Give at least one input.")
    gain = torch.zeros(row_count(pool), dtype=torch.float64)
    doubt = 0.0
    for query in iterate_queries(
        posterior, targets, _count_query_numbers(posterior, row_count(pool))
    ):
        A = compute_mean_slopes(posterior.likelihood.predictive, query.f, query.K)
        doubt += float(compute_first_order_variance(A, query.K).sum())
        start = 0
        for f, J in _linearise_in_chunks(posterior, pool):
            gain[start : start + len(f)] += _compute_removed_doubt(posterior, f, J, query, A)
            start += len(f)

    count = row_count(targets)
    return LabelGains(gain / count, doubt / count)


def _compute_removed_doubt(
    posterior: Posterior, f: Tensor, J: Jacobian, query: Query, A: Tensor
) -> Tensor:
    """Compute the doubt at a query, summed over its inputs, that a label of each row removes (b,).

    f (b, C) and J: outputs and Jacobian of the rows. A (q, M, C): the slopes of the query's means
    of y, see `compute_mean_slopes`.
    """
    # A label takes X Q Xᵀ from the query's K, with Q = L(I + LᵀKL)⁻¹Lᵀ = BᵀB.
    L = covariance_root(posterior.likelihood.fisher(f))
    eye = torch.eye(L.shape[-1], dtype=torch.float64)
    factor = torch.linalg.cholesky(eye + L.mT @ posterior.covariance.covariance(J) @ L)
    B = torch.linalg.solve_triangular(factor, L.mT, upper=False)
    X = J.push_many(query.solved).view(*f.shape, *query.f.shape)  # (b, C, q, C)
    # tr(A X Q Xᵀ Aᵀ) is the sum of the squares of B X Aᵀ.
    return torch.einsum("bka,baqc,qmc->bkqm", B, X, A).square().sum((1, 2, 3))


def _linearise_in_chunks(posterior: Posterior, x: Inputs) -> Iterator[tuple[Tensor, Jacobian]]:
    """Yield f (b, C) and J of the rows of x, in float64, at most ROWS_AT_ONCE rows at a time."""
    for start in range(0, row_count(x), ROWS_AT_ONCE):
        for f, J in posterior.linearised(take_rows(x, slice(start, start + ROWS_AT_ONCE))):
            yield f.double(), J.double()


def _check_posterior(posterior: Posterior, task: str) -> None:
    """Raise ValueError for another convention than the exact one, and TypeError for angles.

    task: the name of the function in the messages.
    """
    if posterior.convention != EXACT:
        raise ValueError(
            f"{task} works with the exact convention only, but this posterior has "
            f"convention={posterior.convention!r}. Use posterior.with_prior(posterior.prior)."
        )

    if posterior.likelihood.predictive.support_for(posterior.network.outputs).kind == "circular":
        raise TypeError(
            f"{task} is for targets on a line or classes: the mean of an angle is not a smooth "
            "function of f."
        )


# --- training rows -------------------------------------------------------------------------


class Query(NamedTuple):
    """The outputs at q inputs, and H⁻¹Jᵀ there, for covariances with other inputs.

    The covariance of the outputs at another input i with them is J_i `solved` (C, q·C).
    """

    f: Tensor  # (q, C)
    K: Tensor  # (q, C, C)
    solved: Tensor  # H⁻¹Jᵀ (P, q·C)


def count_queries_at_once(posterior: Posterior, numbers: int) -> int:
    """Return how many inputs of a query fit an eighth of the memory budget (a guess), at least one.

    numbers: how many numbers each output of an input needs, beside four vectors of the size of θ.
    """
    numbers_of_input = posterior.network.outputs * (4 * len(posterior.theta) + numbers)
    return max(posterior.memory_budget // 8 // (8 * numbers_of_input), 1)


def iterate_queries(posterior: Posterior, x: Inputs, numbers: int) -> Iterator[Query]:
    """Yield the inputs x as queries, a few inputs at a time.

    numbers: as in `count_queries_at_once`.
    """
    at_once = count_queries_at_once(posterior, numbers)
    for start in range(0, row_count(x), at_once):
        for f, J in posterior.linearised(take_rows(x, slice(start, start + at_once))):
            J = J.double()
            columns = J.to_dense().values.flatten(0, 1).mT.contiguous()  # Jᵀ (P, q·C)
            solved = posterior.covariance.solve_many(columns)
            yield Query(f.double(), posterior.covariance.covariance(J), solved)


def _count_query_numbers(posterior: Posterior, rows: int) -> int:
    """Return how many numbers an output of a query needs with a chunk of `rows` other rows.

    The numbers are those of X, ΛX, t and a copy (a guess).
    """
    chunk = min(posterior.network.rows_at_once(posterior.memory_budget), rows, ROWS_AT_ONCE)
    return 4 * posterior.network.outputs * chunk


def _measure_influence(
    posterior: Posterior, x: Inputs, top: int | None, by: str, data: Any
) -> tuple[Influence, Tensor]:
    """Find the training rows with the most influence at x, and those that cannot be removed.

    Returns the influence, and flags (n,) bool of the rows that cannot be removed from the fit. The
    sites are read once for each query, from memory where they fit.

    top: how many rows; None: all. by: MEAN or VARIANCE, by which rows are ranked. data: the
    training rows; None: those that the posterior keeps. Raises ValueError where the result exceeds
    the memory budget, or the data are not those of the fit.
    """
    n = posterior.statistics.n
    most = n if top is None else min(top, n)
    _check_influence_size(posterior, row_count(x), most)
    sites = collect_sites(posterior, data, PURPOSE, ROWS_AT_ONCE)
    failed = torch.zeros(n, dtype=torch.bool)
    ranked = []
    for query in iterate_queries(posterior, x, _count_query_numbers(posterior, n)):
        best_rows: _RankedRows | None = None
        response = (
            None
            if posterior.likelihood.quadratic
            else _compute_precision_response(posterior, sites, query)
        )
        start = 0
        for site in sites:
            removal = _compute_removal(site, posterior.covariance)
            failed[start : start + len(site.f)] = ~removal.sound
            rows = _compute_influence(posterior, site, removal, query, response, by)
            best_rows = _keep_best_rows(best_rows, rows._replace(rows=rows.rows + start), most)
            start += len(site.f)

        assert best_rows is not None
        ranked.append(best_rows)

    score, places, mean, variance = (torch.cat(column) for column in zip(*ranked, strict=True))

    # Rows that cannot be removed have a negative score. They are last, and the same number of them
    # for every input.
    kept = most - int((score[0] < 0).sum())
    return Influence(places[:, :kept], mean[:, :kept], variance[:, :kept]), failed


def _check_influence_size(posterior: Posterior, inputs: int, most: int) -> None:
    """Raise ValueError if the influence of `most` rows on the inputs exceeds the memory budget."""
    # The fields of `_RankedRows`, at 8 bytes a number
    needed_bytes = 8 * inputs * most * (2 * posterior.network.outputs + 2)
    if needed_bytes > posterior.memory_budget:
        raise ValueError(
            f"The influence of {most:,} rows on {inputs:,} inputs takes "
            f"{needed_bytes / 2**20:,.0f} MiB, more than the memory budget of "
            f"{posterior.memory_budget / 2**20:,.0f} MiB. Give a smaller top, or fewer inputs."
        )


def _compute_influence(
    posterior: Posterior,
    site: Site,
    removal: _Removal,
    query: Query,
    response: Tensor | None,
    by: str,
) -> _RankedRows:
    """Compute what each row of a chunk adds to the outputs of a query and to their variances.

    The result has the b rows of the chunk for each of the q inputs of the query, not ranked. Their
    places are those in the chunk.

    removal: that of the rows. response: S v (P, q·C) of `_compute_precision_response`; None for
    Gaussian noise. by: MEAN or VARIANCE, for the score. A row that cannot be removed has score −1.
    site: the rows of the chunk.
    """
    C = site.f.shape[1]
    a, W, sound = removal

    # In the sums b is a row of the chunk, q an input of the query, and a, c and d are outputs.
    X = site.J.push_many(query.solved).view(len(a), C, -1, C)  # (b, C, q, C)
    mean = torch.einsum("baqc,ba->qbc", X, a)
    variance = -torch.einsum("baqc,bad,bdqc->qbc", X, W, X)
    if response is not None:
        # The row also moves the precisions of all rows. The share `OWN` of the change of its own
        # precision is left out, because the row leaves with it (see the module).
        of_all_rows = torch.einsum("baqc,ba->qbc", site.J.push_many(response).view_as(X), a)
        of_own_row = torch.einsum(
            "baqc,bad,bdqc->qbc", X, _differentiate_own_precision(posterior, site, a), X
        )
        variance -= of_all_rows - OWN * of_own_row

    # Rows are ranked in units of the outputs' own variances, summed over outputs.
    scale = query.K.diagonal(dim1=-2, dim2=-1).clamp_min(TINY)  # (q, C)
    score = (mean.square() if by == MEAN else variance.abs()) / scale.unsqueeze(1)
    score = score.sum(-1).masked_fill(~sound, -1.0)
    places = torch.arange(len(a)).expand(len(score), -1)
    return _RankedRows(score, places, mean, variance)


def _compute_precision_response(posterior: Posterior, sites: Sites, query: Query) -> Tensor:
    """Compute S v (P, q·C): how the variances at a query change with θ, through the Λ of all rows.

    S v is that of the module, for each input and output of the query: through the Λ of all rows,
    row i adds −aᵀJ_i S v to the variance. sites: those of all training rows.
    """
    total = torch.zeros_like(query.solved)
    for site in sites:
        X = site.J.push_many(query.solved)  # (b, C, q·C)
        deviation = posterior.covariance.root(site.J).variances().clamp_min(TINY).sqrt()
        steps = STEP * deviation
        slopes = []  # t of the module: the derivatives of (J c)ᵀΛ(J c) in each output
        for d in range(X.shape[1]):
            move = torch.zeros_like(site.f)
            move[:, d] = steps[:, d]
            change = _compute_precision_change(posterior, site, move)
            # A central difference; where the precision is not finite, it counts as zero.
            change = torch.nan_to_num(change / (2 * steps[:, d, None, None]), 0.0, 0.0, 0.0)
            slopes.append((X * (change @ X)).sum(1))

        total += site.J.pull_many(torch.stack(slopes, 1) * site.row_weights[:, None, None])

    return posterior.covariance.solve_many(total)


def _differentiate_own_precision(posterior: Posterior, site: Site, a: Tensor) -> Tensor:
    """Compute the derivative of each row's Λ along K a, the row's effect on its own outputs.

    a (b, C): that of `_Removal`. The result is (b, C, C), for one copy of a row of weight above 1.
    site: the b rows.
    """
    K = posterior.covariance.covariance(site.J)
    move = (K @ a.unsqueeze(-1)).squeeze(-1)
    deviation = K.diagonal(dim1=-2, dim2=-1).clamp_min(TINY).sqrt()
    # The step is at most STEP standard deviations of any output.
    step = STEP / (move / deviation).abs().amax(-1).clamp_min(STEP)
    change = _compute_precision_change(posterior, site, move * step.unsqueeze(-1))
    # A central difference; where the precision is not finite, it counts as zero.
    once = site.row_weights.clamp_max(1.0)
    return torch.nan_to_num(change * (once / (2 * step))[:, None, None], 0.0, 0.0, 0.0)


def _compute_precision_change(posterior: Posterior, site: Site, move: Tensor) -> Tensor:
    """Compute Λ at the outputs f + move less Λ at f − move: move (b, C) -> (b, C, C).

    site: the b rows.
    """
    above = _compute_precision(posterior, site, site.f + move)
    return above - _compute_precision(posterior, site, site.f - move)


def _compute_precision(posterior: Posterior, site: Site, f: Tensor) -> Tensor:
    """Compute Λ of the rows of a site (b, C, C), with outputs f (b, C) in place of theirs.

    Λ is the Fisher, or for a variational Gaussian the average that its fit used.
    """
    if posterior.variational is None:
        return posterior.likelihood.fisher(f)
    output_root = posterior.covariance.root(site.J)
    return averages(
        posterior.likelihood, site.y, f, output_root, uses_expected_fisher(posterior)
    ).precision


class _RankedRows(NamedTuple):
    """k training rows for each of q inputs, with their influence there."""

    score: Tensor  # by which the rows are ranked (q, k)
    rows: Tensor  # their places among the training rows, or in their chunk (q, k)
    mean: Tensor  # what the row adds to f (q, k, C)
    variance: Tensor  # what the row adds to the variance of f (q, k, C)


def _keep_best_rows(old: _RankedRows | None, new: _RankedRows, most: int) -> _RankedRows:
    """Return the `most` rows with the highest scores of old and new together, the highest first.

    Of rows with equal scores the earlier one is kept. old=None: there are no old rows.
    """
    all_rows = new
    if old is not None:
        all_rows = _RankedRows(*(torch.cat(pair, 1) for pair in zip(old, new, strict=True)))
    order = all_rows.score.argsort(dim=1, descending=True, stable=True)[:, :most]
    order_of_outputs = order.unsqueeze(-1).expand(-1, -1, all_rows.mean.shape[-1])
    return _RankedRows(
        all_rows.score.gather(1, order),
        all_rows.rows.gather(1, order),
        all_rows.mean.gather(1, order_of_outputs),
        all_rows.variance.gather(1, order_of_outputs),
    )


class _Removal(NamedTuple):
    """The terms by which removing a row changes other outputs (see the module).

    The row adds X a to the mean and −X W Xᵀ to the variance.
    """

    a: Tensor  # (b, C); zero where not sound
    W: Tensor  # (b, C, C); zero where not sound
    sound: Tensor  # (b,) bool: I − RᵀΛR is positive definite


def _compute_removal(site: Site, covariance: Operator) -> _Removal:
    """Compute the effect of removing each row of a site from the fit, one at a time.

    covariance: that of θ. A row of weight above 1 stands for several copies, of which one is
    removed.
    """
    once = site.row_weights.clamp_max(1.0)
    g = site.score * once[:, None]
    Lambda = site.precision * once[:, None, None]

    # A site that is not finite counts as zero here and as not sound below.
    is_finite = torch.isfinite(g).all(-1) & torch.isfinite(Lambda).all(-1).all(-1)
    g = torch.where(is_finite[:, None], g, 0.0)
    Lambda = torch.where(is_finite[:, None, None], Lambda, 0.0)

    # I − RᵀΛR = M in its eigenvectors: M⁻¹ needs no inverse, and its smallest eigenvalue tells
    # whether the row can be removed.
    R = covariance_root(covariance.covariance(site.J))
    S = R.mT @ Lambda @ R
    values, vectors = torch.linalg.eigh(torch.eye(S.shape[-1], dtype=S.dtype) - (S + S.mT) / 2)
    sound = is_finite & (values[:, 0] > LEAST)
    axes = R @ vectors / values.clamp_min(LEAST).sqrt().unsqueeze(-2)  # R M⁻¹Rᵀ = axes axesᵀ
    weighted_axes = Lambda @ axes
    a = g + (weighted_axes @ (axes.mT @ g.unsqueeze(-1))).squeeze(-1)
    W = Lambda + weighted_axes @ weighted_axes.mT
    return _Removal(
        torch.where(sound[:, None], a, 0.0), torch.where(sound[:, None, None], W, 0.0), sound
    )


# --- doubt and inputs ----------------------------------------------------------------------


def compute_mean_slopes(likelihood: Likelihood, f: Tensor, K: Tensor) -> Tensor:
    """Compute the derivative ∂E[y|f]/∂f (N, M, C), where E[y|f] has M values for each input.

    f (N, C): where. K (N, C, C): covariance of f, whose diagonal sets the steps of central
    differences. These are used where autograd cannot differentiate the mean.
    """
    if not likelihood.mean_has_gradient:
        steps = STEP * K.diagonal(dim1=-2, dim2=-1).clamp_min(TINY).sqrt()
        columns = []
        for c in range(f.shape[1]):
            move = torch.zeros_like(f)
            move[:, c] = steps[:, c]
            change = likelihood.mean(f + move) - likelihood.mean(f - move)
            columns.append(change.reshape(len(f), -1) / (2 * steps[:, c, None]))
        return torch.stack(columns, -1)

    with torch.enable_grad():
        variable = f.detach().clone().requires_grad_(True)
        mean = likelihood.mean(variable).reshape(len(f), -1)
        rows = [
            torch.autograd.grad(mean[:, m].sum(), variable, retain_graph=True)[0]
            for m in range(mean.shape[1])
        ]

    return torch.stack(rows, 1)


def compute_first_order_variance(A: Tensor, K: Tensor) -> Tensor:
    """Compute the variance of E[y|f] to first order, which is the diagonal of A K Aᵀ.

    A (N, M, C): the slopes of `compute_mean_slopes`. K (N, C, C). The result is (N, M).
    """
    return ((A @ K) * A).sum(-1)


def _choose_reference(posterior: Posterior, x: Inputs, reference: Any, data: Any) -> Tensor | None:
    """Return the reference values (D,) of the columns of x; None if x is not a table of numbers.

    reference: as given by the user; None: the means over the training rows. data: these rows; None:
    those that the posterior keeps. Raises ValueError for a reference where x is not a table, of
    another shape, or that is not finite.
    """
    cast = posterior.network.cast(x)
    if not isinstance(cast, Tensor) or cast.dim() != 2 or not cast.is_floating_point():
        if reference is not None:
            raise ValueError(
                "reference is for inputs in a table of numbers (N, D), but x is not one. Leave it "
                "out."
            )
        return None

    if reference is not None:
        values = as_tensor(reference).to("cpu", torch.float64)
        if values.shape != cast.shape[1:]:
            raise ValueError(
                f"reference must have shape ({cast.shape[1]},), as a row of x, but has "
                f"{tuple(values.shape)}."
            )
        check_finite("reference", values, "Give finite values.")
        return values

    return _average_inputs(posterior, cast.shape[1], data)


def _average_inputs(posterior: Posterior, columns: int, data: Any) -> Tensor:
    """Compute the mean of each column over the training rows, by row weight (columns,).

    data: the training rows; None: those that the posterior keeps.
    """
    total = torch.zeros(columns, dtype=torch.float64)
    weight = 0.0
    for batch in open_training_data(posterior, data, PURPOSE):
        rows = batch.x.to("cpu", torch.float64)
        if batch.weights is None:
            weights = torch.ones(len(rows), dtype=torch.float64)
        else:
            weights = batch.weights.to("cpu", torch.float64)
        total += weights @ rows
        weight += float(weights.sum())

    return total / weight


def _compute_input_effects(posterior: Posterior, x: Tensor, reference: Tensor) -> Tensor:
    """Compute for each column the doubt at x less the doubt with the column at its reference.

    x (N, D), reference (D,) -> (N, D). The doubt is summed over the values of y.
    """
    x = x.to("cpu", torch.float64)
    N, D = x.shape
    doubt = _compute_doubt(posterior, x)
    at_once = max(VARIANTS // N, 1)
    doubt_at_reference = []
    for start in range(0, D, at_once):
        columns = torch.arange(start, min(start + at_once, D))
        changed = x.repeat(len(columns), 1, 1)  # (d, N, D)
        # Copy number i of the inputs has column `columns[i]` at its reference.
        changed[torch.arange(len(columns)), :, columns] = reference[columns, None]
        changed_doubt = _compute_doubt(posterior, changed.flatten(0, 1))
        doubt_at_reference.append(changed_doubt.view(len(columns), N))

    return doubt[:, None] - torch.cat(doubt_at_reference).mT


def _compute_doubt(posterior: Posterior, x: Tensor) -> Tensor:
    """Compute the variance of E[y|f] to first order at x (N, D), summed over values of y: (N,)."""
    marginal = posterior.outputs_at(x)
    A = compute_mean_slopes(posterior.likelihood.predictive, *marginal)
    return compute_first_order_variance(A, marginal.covariance).sum(-1)
