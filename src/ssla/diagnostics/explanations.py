"""Why is this prediction unsure? Training rows, inputs, noise and prior behind it; and which row to
label next. No refit.

Row i contributes a site to the Gaussian of θ: its score g and its precision Λ (see
`leave_one_out`). Without the site, the outputs at another input x, with X = J_x S J_iᵀ (C, C), K =
J_i S J_iᵀ = R Rᵀ and M = I − RᵀΛR, have

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

from ssla._checks import finite, one_of, warn
from ssla.curvature import Operator
from ssla.curvature.jacobians import Jacobian
from ssla.data import Inputs, as_inputs, as_tensor, row_count, slice_inputs
from ssla.likelihoods import Likelihood
from ssla.likelihoods.averages import averages
from ssla.maths.linalg import root
from ssla.predictive import predict
from ssla.predictive.cavities import LEAST, Site, Sites, by_fisher, collect
from ssla.priors import EXACT
from ssla.refit.prior_response import prior_response
from ssla.refit.weights.refit_rows import Purpose, training_data
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

PURPOSE = Purpose("ssla.explain", "The data", "ssla.explain(posterior, x, data={})")
MEAN, VARIANCE = "mean", "variance"
SHOWN = 3  # queries that are printed, and rows and inputs of each
STEP = 0.01  # of a standard deviation of f: for central differences of what autograd cannot follow
# of a row's own term that is taken out: no derived value, see above and
# tests/predictive/test_explanations.py
OWN = 0.5
# training rows that meet several queries: fewer rows leave room for more queries in a pass
ROWS_AT_ONCE = 1024
VARIANTS = 4096  # inputs with one changed column that are evaluated together


class Influence(NamedTuple):
    """The training rows that count most at each of N inputs, the first of k the most.

    In the outputs f.
    """

    rows: Tensor  # (N, k): their places in the order in which the data are read, from 0
    mean: Tensor  # what the row adds to f (N, k, C): with the row − without it
    # what the row adds to the variance of f (N, k, C): below zero, where it makes the answer surer
    variance: Tensor


class Split(NamedTuple):
    """The variance of y = noise + doubt, each of the shape of `predictive.variance`; the prior's
    part is within the doubt.

    doubt = J H⁻¹ (data + prior) H⁻¹ Jᵀ: `prior` is the second term. It is all of the doubt without
    data and vanishes with many, and it is how fast the doubt falls when the log precision of the
    prior rises. For a mean of y that is not linear in f it is in the proportion of the first-order
    terms; a prior that is not log-concave may make it negative.
    """

    noise: Tensor
    doubt: Tensor
    prior: Tensor


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why the predictions at N inputs are unsure. Made by `ssla.explain`."""

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
        return "\n".join(
            line for i in range(min(len(self.marginal.mean), SHOWN)) for line in self._lines(i)
        )

    def _lines(self, i: int) -> list[str]:
        noise, doubt, prior = (float(part[i].sum()) for part in self.split)
        rows = [
            f"row {row} moves f by {_numbers(mean)} and its variance by {_numbers(variance)}"
            for row, mean, variance in zip(
                *(part[i][:SHOWN].tolist() for part in self.influence), strict=True
            )
        ]
        lines = [
            f"input {i}",
            f"  variance   {noise + doubt:.4g} = noise {noise:.4g} + doubt {doubt:.4g}, of which "
            f"the prior decides {prior:.4g}",
            *(f"  {'rows' if k == 0 else '':<9}  {text}" for k, text in enumerate(rows)),
        ]
        if self.inputs is not None:
            own = self.inputs[i]
            top = own.abs().argsort(descending=True, stable=True)[:SHOWN].tolist()
            lines.append(
                "  inputs     "
                + ", ".join(f"{j}: {float(own[j]):+.3g}" for j in top)
                + " of the doubt"
            )
        return lines


def _numbers(values: list[float]) -> str:
    shown = ", ".join(f"{value:+.3g}" for value in values[:SHOWN])
    return shown if len(values) == 1 else f"({shown}{', …' * (len(values) > SHOWN)})"


@dataclass(frozen=True, eq=False)
class LabelGains:
    """What a label for each row of a pool would be worth. Made by `ssla.label_next`."""

    gain: Tensor  # (M,): by how much the mean doubt at the targets falls when this row is labelled
    doubt: float  # the mean doubt at the targets now, summed over the outputs

    @property
    def order(self) -> Tensor:
        """The rows of the pool (M,), the most useful first."""
        return self.gain.argsort(descending=True, stable=True)

    @property
    def best(self) -> int:
        """The row to label next."""
        return int(self.gain.argmax())


def explain(
    posterior: Posterior,
    x: Inputs,
    top: int | None = 10,
    by: str = MEAN,
    reference: Any = None,
    data: Any = None,
) -> Explanation:
    """See ssla.explain."""
    _check(posterior, "ssla.explain")
    one_of("by", by, (MEAN, VARIANCE))
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise ValueError(
            f"top must be a whole number from 1, or None for all rows, but is {top!r}."
        )
    x = as_inputs(x)
    if row_count(x) == 0:
        raise ValueError("x has no rows. Give at least one input to explain.")
    where = _reference(posterior, x, reference, data)  # checked before the long pass
    influence, failed = _influence(posterior, x, top, by, data)
    if bool(failed.any()):
        warn(
            f"ssla.explain leaves out {int(failed.sum())} of {len(failed)} training rows: their "
            "share of the fit cannot be removed from it. Likely cause: structure='diag' or "
            "'kfac' describes these rows badly. Use structure='dense'.",
            RuntimeWarning,
        )
    predictive = predict(posterior, x)
    marginal = posterior.outputs_at(x)
    doubt = predictive.law.epistemic
    A = slopes(posterior.likelihood.predictive, *marginal)
    share = first_order_variance(A, prior_response(posterior, x).covariance) / first_order_variance(
        A, marginal.covariance
    )
    prior = doubt * share.nan_to_num(0.0, 0.0, 0.0).reshape(doubt.shape)
    inputs = None if where is None else _one_at_a_time(posterior, x, where)
    return Explanation(
        marginal, influence, Split(predictive.law.aleatoric, doubt, prior), inputs, where, failed
    )


def label_next(posterior: Posterior, pool: Inputs, targets: Inputs = None) -> LabelGains:
    """See ssla.label_next."""
    _check(posterior, "ssla.label_next")
    pool = as_inputs(pool)
    aim = pool if targets is None else as_inputs(targets)
    for what, rows in (("pool", row_count(pool)), ("targets", row_count(aim))):
        if rows == 0:
            raise ValueError(f"{what} has no rows. Give at least one input.")
    gain, total = torch.zeros(row_count(pool), dtype=torch.float64), 0.0
    for query in queries(posterior, aim, _products(posterior, row_count(pool))):
        A = slopes(posterior.likelihood.predictive, query.f, query.K)
        total += float(first_order_variance(A, query.K).sum())
        start = 0
        for f, J in _in_chunks(posterior, pool):
            L = root(posterior.likelihood.fisher(f))
            eye = torch.eye(L.shape[-1], dtype=torch.float64)
            inner = torch.linalg.cholesky(eye + L.mT @ posterior.covariance.covariance(J) @ L)
            B = torch.linalg.solve_triangular(inner, L.mT, upper=False)  # Q = BᵀB
            X = J.push_many(query.solved).view(*f.shape, *query.f.shape)  # (b, C, q, C)
            gain[start : start + len(f)] += (
                torch.einsum("bka,baqc,qmc->bkqm", B, X, A).square().sum((1, 2, 3))
            )
            start += len(f)
    rows = row_count(aim)
    return LabelGains(gain / rows, total / rows)


def _in_chunks(posterior: Posterior, x: Inputs) -> Iterator[tuple[Tensor, Jacobian]]:
    """f and J at x in float64, at most ROWS_AT_ONCE rows at a time."""
    for start in range(0, row_count(x), ROWS_AT_ONCE):
        for f, J in posterior.linearised(slice_inputs(x, slice(start, start + ROWS_AT_ONCE))):
            yield f.double(), J.double()


def _check(posterior: Posterior, task: str) -> None:
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
    """Some inputs, and what every other input's covariance with them needs."""

    f: Tensor  # (q, C)
    K: Tensor  # (q, C, C)
    solved: Tensor  # H⁻¹Jᵀ (P, q·C)


def queries(posterior: Posterior, x: Inputs, numbers: int) -> Iterator[Query]:
    """x, a few inputs at a time: so many numbers for each output of each input fit a share of
    the memory budget.
    """
    C, size = posterior.network.outputs, len(posterior.theta)
    some = max(posterior.memory_budget // 8 // (8 * C * (4 * size + numbers)), 1)  # V and S v
    for start in range(0, row_count(x), some):
        for f, J in posterior.linearised(slice_inputs(x, slice(start, start + some))):
            J = J.double()
            solved = posterior.covariance.solve_many(J.dense().values.flatten(0, 1).mT.contiguous())
            yield Query(f.double(), posterior.covariance.covariance(J), solved)


def _products(posterior: Posterior, rows: int) -> int:
    """The numbers that an output of a query takes with a chunk of `rows` other rows: X, ΛX and
    t.
    """
    return (
        4
        * posterior.network.outputs
        * min(posterior.network.rows_at_once(posterior.memory_budget), rows, ROWS_AT_ONCE)
    )


def _influence(
    posterior: Posterior, x: Inputs, top: int | None, by: str, data: Any
) -> tuple[Influence, Tensor]:
    n, C = posterior.statistics.n, posterior.network.outputs
    most = n if top is None else min(top, n)
    need = 8 * row_count(x) * most * (2 * C + 2)
    if need > posterior.memory_budget:
        raise ValueError(
            f"The influence of {most:,} rows on {row_count(x):,} inputs takes {need / 2**20:,.0f} "
            f"MiB, more than the memory budget of {posterior.memory_budget / 2**20:,.0f} MiB. Give "
            "a smaller top, or fewer inputs."
        )
    sites = collect(posterior, data, PURPOSE, ROWS_AT_ONCE)
    found = []
    failed = torch.zeros(n, dtype=torch.bool)
    for query in queries(posterior, x, _products(posterior, n)):
        best: _Best | None = None
        start = 0
        bend = None if posterior.likelihood.quadratic else _bend(posterior, sites, query)
        scale = query.K.diagonal(dim1=-2, dim2=-1).clamp_min(
            torch.finfo(torch.float64).tiny
        )  # (q, C)
        for site in sites:
            a, W, sound = _without(site, posterior.covariance)
            failed[start : start + len(a)] = ~sound
            X = site.J.push_many(query.solved).view(len(a), C, -1, C)  # (b, C, q, C)
            mean = torch.einsum("baqc,ba->qbc", X, a)
            variance = -torch.einsum("baqc,bad,bdqc->qbc", X, W, X)
            if bend is not None:
                every = torch.einsum("baqc,ba->qbc", site.J.push_many(bend).view_as(X), a)
                own = torch.einsum("baqc,bad,bdqc->qbc", X, _own_rise(posterior, site, a), X)
                variance -= every - OWN * own
            score = (mean.square() if by == MEAN else variance.abs()) / scale.unsqueeze(1)
            score = score.sum(-1).masked_fill(~sound, -1.0)
            rows = torch.arange(start, start + len(a)).expand(len(score), -1)
            best = _best(best, _Best(score, rows, mean, variance), most)
            start += len(a)
        assert best is not None
        found.append(best)
    score, rows, mean, variance = (torch.cat(column) for column in zip(*found, strict=True))
    kept = most - int((score[0] < 0).sum())  # the same for every input: rows that failed are last
    return Influence(rows[:, :kept], mean[:, :kept], variance[:, :kept]), failed


def _bend(posterior: Posterior, sites: Sites, query: Query) -> Tensor:
    """S v (P, q·C): how the variances at the query depend on θ, through the precisions of all
    rows.
    """
    total = torch.zeros_like(query.solved)
    for site in sites:
        X = site.J.push_many(query.solved)  # (b, C, q·C)
        steps = (
            STEP
            * posterior.covariance.root(site.J)
            .variances()
            .clamp_min(torch.finfo(torch.float64).tiny)
            .sqrt()
        )
        slopes = []
        for d in range(X.shape[1]):
            move = torch.zeros_like(site.f)
            move[:, d] = steps[:, d]
            rise = _precision(posterior, site, site.f + move) - _precision(
                posterior, site, site.f - move
            )
            rise = torch.nan_to_num(rise / (2 * steps[:, d, None, None]), 0.0, 0.0, 0.0)
            slopes.append((X * (rise @ X)).sum(1))
        total += site.J.pull_many(torch.stack(slopes, 1) * site.row_weights[:, None, None])
    return posterior.covariance.solve_many(total)


def _own_rise(posterior: Posterior, site: Site, a: Tensor) -> Tensor:
    """The derivative of Λ_i along K_i a, the row's effect on its own outputs (b, C, C)."""
    K = posterior.covariance.covariance(site.J)
    move = (K @ a.unsqueeze(-1)).squeeze(-1)
    sd = K.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    step = STEP / (move / sd).abs().amax(-1).clamp_min(
        STEP
    )  # at most STEP standard deviations of any output
    move = move * step.unsqueeze(-1)
    rise = _precision(posterior, site, site.f + move) - _precision(posterior, site, site.f - move)
    once = site.row_weights.clamp_max(1.0)
    return torch.nan_to_num(rise * (once / (2 * step))[:, None, None], 0.0, 0.0, 0.0)


def _precision(posterior: Posterior, site: Site, f: Tensor) -> Tensor:
    """Λ of the sites with other outputs (b, C, C)."""
    if posterior.variational is None:
        return posterior.likelihood.fisher(f)
    return averages(
        posterior.likelihood, site.y, f, posterior.covariance.root(site.J), by_fisher(posterior)
    ).precision


class _Best(NamedTuple):
    score: Tensor  # (q, k)
    rows: Tensor
    mean: Tensor  # (q, k, C)
    variance: Tensor


def _best(old: _Best | None, new: _Best, most: int) -> _Best:
    """The rows of the highest scores of both; of equal ones the first."""
    both = (
        new if old is None else _Best(*(torch.cat(pair, 1) for pair in zip(old, new, strict=True)))
    )
    order = both.score.argsort(dim=1, descending=True, stable=True)[:, :most]
    wide = order.unsqueeze(-1).expand(-1, -1, both.mean.shape[-1])
    return _Best(
        both.score.gather(1, order),
        both.rows.gather(1, order),
        both.mean.gather(1, wide),
        both.variance.gather(1, wide),
    )


def _without(site: Site, covariance: Operator) -> tuple[Tensor, Tensor, Tensor]:
    """a (b, C), W (b, C, C), and whether I − RᵀΛR is positive definite (b,); zero where it is
    not.
    """
    once = site.row_weights.clamp_max(1.0)
    g, Lambda = site.score * once[:, None], site.precision * once[:, None, None]
    known = torch.isfinite(g).all(-1) & torch.isfinite(Lambda).all(-1).all(-1)
    g, Lambda = torch.where(known[:, None], g, 0.0), torch.where(known[:, None, None], Lambda, 0.0)
    R = root(covariance.covariance(site.J))
    S = R.mT @ Lambda @ R
    values, vectors = torch.linalg.eigh(torch.eye(S.shape[-1], dtype=S.dtype) - (S + S.mT) / 2)
    sound = known & (values[:, 0] > LEAST)
    axes = R @ vectors / values.clamp_min(LEAST).sqrt().unsqueeze(-2)  # R M⁻¹Rᵀ = axes axesᵀ
    back = Lambda @ axes
    a = g + (back @ (axes.mT @ g.unsqueeze(-1))).squeeze(-1)
    W = Lambda + back @ back.mT
    return torch.where(sound[:, None], a, 0.0), torch.where(sound[:, None, None], W, 0.0), sound


# --- doubt and inputs ----------------------------------------------------------------------


def slopes(likelihood: Likelihood, f: Tensor, K: Tensor) -> Tensor:
    """∂E[y|f]/∂f (N, M, C); M values of y for each input."""
    if not likelihood.mean_has_gradient:
        steps = (
            STEP * K.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        )
        columns = []
        for c in range(f.shape[1]):
            move = torch.zeros_like(f)
            move[:, c] = steps[:, c]
            rise = likelihood.mean(f + move) - likelihood.mean(f - move)
            columns.append(rise.reshape(len(f), -1) / (2 * steps[:, c, None]))
        return torch.stack(columns, -1)
    with torch.enable_grad():
        free = f.detach().clone().requires_grad_(True)
        mean = likelihood.mean(free).reshape(len(f), -1)
        rows = [
            torch.autograd.grad(mean[:, m].sum(), free, retain_graph=True)[0]
            for m in range(mean.shape[1])
        ]
    return torch.stack(rows, 1)


def first_order_variance(A: Tensor, K: Tensor) -> Tensor:
    """The diagonal of A K Aᵀ (N, M): the variance of E[y|f] to first order."""
    return ((A @ K) * A).sum(-1)


def _reference(posterior: Posterior, x: Inputs, reference: Any, data: Any) -> Tensor | None:
    """What each input is compared with (D,): by default its mean over the training rows.

    None: x is not a table of numbers.
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
        given = as_tensor(reference).to("cpu", torch.float64)
        if given.shape != cast.shape[1:]:
            raise ValueError(
                f"reference must have shape ({cast.shape[1]},), as a row of x, but has "
                f"{tuple(given.shape)}."
            )
        finite("reference", given, "Give finite values.")
        return given
    total, weight = torch.zeros(cast.shape[1], dtype=torch.float64), 0.0
    for batch in training_data(posterior, data, PURPOSE):
        rows = batch.x.to("cpu", torch.float64)
        each = (
            torch.ones(len(rows), dtype=torch.float64)
            if batch.weights is None
            else batch.weights.to("cpu", torch.float64)
        )
        total += each @ rows
        weight += float(each.sum())
    return total / weight


def _one_at_a_time(posterior: Posterior, x: Tensor, reference: Tensor) -> Tensor:
    """The doubt at x less the doubt with column j at its reference (N, D)."""
    x = x.to("cpu", torch.float64)
    N, D = x.shape
    here = _doubt(posterior, x)
    some = max(VARIANTS // N, 1)
    parts = []
    for start in range(0, D, some):
        columns = torch.arange(start, min(start + some, D))
        other = x.repeat(len(columns), 1, 1)  # (d, N, D)
        other[torch.arange(len(columns)), :, columns] = reference[columns, None]
        parts.append(_doubt(posterior, other.flatten(0, 1)).view(len(columns), N))
    return here[:, None] - torch.cat(parts).mT


def _doubt(posterior: Posterior, x: Tensor) -> Tensor:
    """The variance of E[y|f] to first order (N,), summed over the values of y."""
    marginal = posterior.outputs_at(x)
    return first_order_variance(
        slopes(posterior.likelihood.predictive, *marginal), marginal.covariance
    ).sum(-1)
