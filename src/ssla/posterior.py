"""The class `Posterior`, and the functions `fit`, `ssla`, `assla`, `explain` and `label_next`.

A posterior is one frozen value: it holds the network, the likelihood, the prior, θ̂, and sums over
the data. The first part of the class is what users call; each method calls the package that does
the work. The second part is the mathematics that those packages share: the Gaussian of θ, and the
outputs at x under it. Its terms:

    θ (P,), θ̂      the free parameters of the network, and where it is linearised
    f (C,), J      the outputs at an input, and their Jacobian in θ at θ̂ (C, P)
    ℓ_D, π         the log likelihood of the data, and the prior
    Λ, H           −∇² log p(y|f) or its expectation, and H = Σ JᵀΛJ − ∇² log π (P, P)
    f̂, K           mean and covariance of f at an input: f at the mean of θ, and K = J H⁻¹Jᵀ (C, C),
                   with the covariance of a variational Gaussian in place of H⁻¹
    refit          how p(y|x, D) follows from p(y|f): for each y the network is fitted again with
                   (x, y), or an approximation of that
    increments     the three terms of log p(y|x, D): changes of log likelihood, log prior, curvature
    tilt           a vector that is subtracted from a gradient, so that θ̂ counts as the mode

docs/mathematics.md derives the formulas.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from ssla import files, predictive
from ssla._checks import all_in_plain_torch, check_finite, in_plain_torch, is_inside_vmap
from ssla.curvature import Operator, Structure
from ssla.curvature.jacobians import Jacobian
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.data import Inputs, Source, as_inputs, input_tensors, split_off_validation
from ssla.diagnostics import conformal, explanations
from ssla.diagnostics.explanations import Explanation, LabelGains
from ssla.diagnostics.loo import LeaveOneOut, leave_one_out
from ssla.files import exporting
from ssla.files.exporting import Exported
from ssla.fitting import fit as fitting
from ssla.fitting import more_data, prior_change, tuning
from ssla.fitting.arguments import checked_budget, checked_plan, checked_weights
from ssla.fitting.further_passes import update_posterior
from ssla.fitting.passes import Reader
from ssla.fitting.ranks import send_errors_to_ranks, share_data_among_ranks
from ssla.fitting.validation import choose_by_validation
from ssla.likelihoods import Likelihood
from ssla.maths.progress import progress_bar
from ssla.maths.roots import Root
from ssla.network import LAST_LAYER, Network, Output, check_output_argument
from ssla.predictive import Predictive, functions
from ssla.predictive.functions import Functions, Joint
from ssla.priors import ADDITIVE, EXACT, BoundPrior, Flat, Prior, indefinite
from ssla.refit import Increments, NoRefit, Refit, WeightRefit, compute_increments_at
from ssla.report import POLISH, Report, TuningHistory
from ssla.values import COARSE, Marginal, Statistics, Variational, evidence_bound, join_chunks


@all_in_plain_torch
@dataclass(frozen=True, eq=False)
class Posterior:
    """A Gaussian approximation of p(θ | D), ready to predict.

    `ssla.fit` makes it; every change is a new value. θ̂ is the mode (or the trained weights): the
    network is linearised there, refits of the weights start there, and `statistics` are the sums
    there. `mean`, `sums` and `covariance` are of the Gaussian that predictions use: the one at the
    mode (Laplace), or the variational one. The posterior holds a private copy of the network, so it
    never writes to the user's module, and later changes of that module have no effect.
    """

    network: Network
    likelihood: Likelihood  # of the training targets
    prior: Prior  # of θ
    theta: Tensor  # θ̂ (P,), float64
    statistics: Statistics  # sums over the data at θ̂
    mode: str  # how θ̂ was chosen: POLISH, TILT or AS_IS
    report: Report  # of the fit and of later changes
    memory_budget: int = DEFAULT_BUDGET  # bytes that intermediate results may take
    # the training data, by reference: what a refit of the weights reads again
    source: Source | None = None
    convention: str = EXACT  # where the prior enters: see `Posterior.with_prior`
    tuning_history: TuningHistory | None = None  # of `tune`, or of a choice by validation rows
    variational: Variational | None = None  # None: predictions use the Gaussian at the mode

    # --- predictions -----------------------------------------------------------------------

    def predict(
        self, x: Inputs, refit: str | Refit = "output", differentiable: bool = False
    ) -> Predictive:
        """Return the predictive distribution of y at x.

        refit: "output" (default: the mode in the outputs), "newton" (one step), "none" (ASSLA),
        "weights" (SSLA: a real refit on all of the data), "auto" (output, and weights where that is
        doubtful), or an object such as `ssla.NoRefit(curvature="fisher")`. differentiable: the
        answers carry gradients in x and y (backward, torch.autograd.grad). It works for Gaussian
        noise, and with refit="output" for the library's other likelihoods; answers without a
        gradient are refused (see docs/models.md). The graph of all rows is held in memory.

        Raises ValueError for a refit that does not suit the convention or the targets.

        >>> post.predict(x).interval(0.95)      # doctest: +SKIP
        """
        return predictive.predict(self, x, refit, differentiable)

    def marginal(self, x: Inputs, differentiable: bool = False) -> Marginal:
        """Compute f̂ (N, C) and K = J H⁻¹ Jᵀ (N, C, C), in bounded memory for any N.

        differentiable: both carry gradients in x, for every likelihood, structure and choice of
        weights.
        """
        marginal = self.outputs_at(x, differentiable)
        template = self.answer_template(marginal)
        return Marginal(marginal.mean.to(template), marginal.covariance.to(template))

    def joint(self, x: Inputs, differentiable: bool = False) -> Joint:
        """Compute f at all inputs as one Gaussian: mean (N·C,) and covariance (N·C, N·C).

        Entry i·C + c is output c at input i. The diagonal blocks are those of `marginal`.
        differentiable: both carry gradients in x. Raises ValueError for a matrix beyond the memory
        budget: `draw_functions` needs none.
        """
        return functions.compute_joint(self, x, differentiable)

    def draw_functions(self, n: int, generator: torch.Generator | None = None) -> Functions:
        """Draw the function f n times, with the covariance of `joint`.

        The draws can be evaluated at any N inputs x, which gives (n, N, C). Each is one draw of the
        weights, in the network linearised at θ̂, so its values in different calls belong together
        (Thompson sampling). No matrix over the inputs is needed. `draws(x, differentiable=True)`
        carries gradients in x.

        >>> draws = post.draw_functions(16, generator)      # doctest: +SKIP
        >>> draws(x).std(0), draws[3](x)                    # doctest: +SKIP
        """
        return functions.draw_functions(self, n, generator)

    def loo(self, data: Any = None, refits: int | None = None) -> LeaveOneOut:
        """Predict every training row from the other rows, without a held-out set.

        The result has log densities, PIT and coverage. It is exact for a linear model with Gaussian
        noise, otherwise an approximation. Influential rows of a last layer, for which the
        approximation is poor, are refitted and counted, at most `refits` of them (by default fewer,
        the more rows there are). Prior, noise and features are kept, so the figures are optimistic
        where the features were trained on the rows. data: the training data, where the posterior
        does not hold them.

        >>> print(post.loo())      # doctest: +SKIP
        """
        return leave_one_out(self, data, refits)

    def predictive_set(
        self, x: Inputs, level: float = 0.95, data: Any = None, rows: Any = None
    ) -> Tensor:
        """Compute approximate full conformal intervals (N, 2), or sets of classes, bool (N, C).

        No calibration rows and no refits are needed. y is in the set unless the score of (x, y) is
        among the highest of all rows after a refit with (x, y). The score is the distance from what
        the other rows predict, in standard deviations; for classes one minus the probability.

        Exact full conformal prediction for a linear model with Gaussian noise, where coverage is at
        least the level for exchangeable rows, even if the model is wrong. Otherwise an
        approximation without that guarantee. Prior, noise and features are kept: if the features
        were trained on the rows, coverage is too low. Then give `rows`.

        rows: bool (n,), the training rows to compare with, in the order in which the data are read.
        Give those on which the features were not trained, for example the rows of early stopping.
        data: the training data, where the posterior does not hold them. Several targets, angles,
        and numbers on a part of the line are refused.

        >>> post.predictive_set(x, 0.9, rows=held_out)      # doctest: +SKIP
        """
        return conformal.predictive_set(self, x, level, data, rows)

    # --- another prior ---------------------------------------------------------------------

    def with_prior(
        self, prior: Prior | Distribution, convention: str = EXACT, data: Any = None
    ) -> Posterior:
        """Return the posterior under another prior, where possible without a pass over the data.

        convention (named in the report and in every result):
          "exact"     the prior is in the refit and in the curvature: Bayes' rule, by Laplace
          "paper"     in the refit, not in the curvature, as in the paper's prior-modularity tables
          "additive"  in neither: θ̂ and θ̃ are the likelihood's, and log π(θ̃) − log π(θ̂) is added

        A polished last layer with Gaussian noise and dense or kfac curvature moves to the new mode
        from the statistics alone (the noise stays what it is). Otherwise θ̂ stays where it is and
        the report says how far from the new mode that is; with `data` (the training data) it is
        polished again.

        A variational Gaussian keeps its averages over the data. Its mean moves: exactly to first
        order with dense or low_rank curvature; with kfac or diag only approximately, and with diag
        hardly better than if it stayed. Under mode="tilt" it stays at the trained weights. With
        `data` the Gaussian is fitted again. The conventions "paper" and "additive" are defined at
        the mode, and take the Gaussian there.
        """
        return prior_change.change_prior(self, prior, convention, data)

    def tune(
        self,
        objective: str = "evidence",
        data: Any = None,
        over: Sequence[str] = ("prior", "noise"),
        per_layer: bool = True,
        folds: int | None = None,
    ) -> Posterior:
        """Return the posterior with prior precisions and noise that the data choose.

        `.tuning_history` of the result shows the search.

        objective: "evidence" (from the statistics, no pass over data; of a variational Gaussian the
        bound, by a few passes), "loo" (leave-one-out log densities of the training rows), or "nll"
        or "crps" of predictions for `data`: a validation set, or the training data with folds=k.
        over: which of "prior" and "noise" are chosen. There is one factor on the precision for each
        layer (or for all with per_layer=False), and one on the noise of a Gaussian likelihood. The
        prior's means and the pattern of its precisions stay.

        >>> tuned = post.tune(); print(tuned.tuning_history)      # doctest: +SKIP
        """
        return tuning.tune(self, objective, data, over, per_layer, folds)

    # --- more data -------------------------------------------------------------------------

    def update(self, data: Any) -> Posterior:
        """Return the posterior with more data, from a pass over the new rows alone.

        A variational Gaussian takes a few passes over them. A polished last layer with Gaussian
        noise and dense or kfac curvature moves to the new mode, as if all data had been fitted at
        once. Otherwise θ̂ stays where it is, and the report says so.

        A variational Gaussian keeps its averages over the earlier rows, and is found again with
        those of the new ones. After mode="polish" its mean moves: with dense and low_rank curvature
        nearly to that of a fit of all rows, with others only approximately. Otherwise the mean
        stays at the trained weights.
        """
        return update_posterior(self, data)

    def merge(self, other: Posterior) -> Posterior:
        """Return the posterior of both data sets (the prior counts once), in any order.

        Both must come from the same network, likelihood, prior, structure and mode, bit by bit, and
        stand at the same θ̂ (fit shards with mode="tilt"). Only where the statistics determine the
        log likelihood exactly may θ̂ differ: it is then moved. Raises ValueError for other pairs.
        """
        return more_data.merge_posteriors(self, other)

    # --- files -----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a directory of tensors and JSON, which `ssla.load(path, model)` opens.

        It needs safetensors. Neither the network nor any data are stored: keep the module's
        state_dict beside it. Returns the path. An older directory there stays until the new one is
        complete. Raises ssla.FileError if the path cannot be written or replaced.
        """
        return files.save(self, path)

    def export(
        self,
        path: str | os.PathLike[str],
        levels: Sequence[float] = exporting.LEVELS,
        example: Inputs = None,
    ) -> Exported:
        """Write one graph from x to the answers of `predict`, to be run without ssla.

        The format is that of the suffix: .onnx, or .pt2 (torch.export). The answers are mean, sd
        and the quantiles at `levels`; for classes they are probabilities and label. They are
        float64; the network computes in its own dtype. The number of rows is free. Posteriors of
        other weights than a last layer are refused.

        example: inputs like those that the graph will see (by default the first batch of the
        training data). The file is compared with the library on them, and it is not written if an
        answer differs by more than 1e-5. The result has the differences. Counts whose sums need
        other nodes than the graph has are NaN.

        >>> print(post.export("model.onnx", example=x))      # doctest: +SKIP
        """
        return exporting.export(self, path, levels, example)

    def log_evidence(self) -> float:
        """Compute ℓ_D(θ̂) + log π(θ̂) + (P/2) log 2π − ½ log|H|, the Laplace evidence.

        The evidence is exact for linear Gaussian models. H holds the prior's curvature under the
        exact convention only. For a variational Gaussian the result is the evidence bound Σ E log p
        + E log π + ½ log|S| + (P/2)(1 + log 2π), with the prior to second order around m.
        """
        if self.variational is not None:
            return evidence_bound(
                self.bound_prior, self.mean, self.covariance, self.sums.log_likelihood
            )
        size = self.theta.numel()
        prior = float(self.bound_prior.log_prob(self.theta))
        operator = self.operator if self.convention == EXACT else self.data_operator
        volume = 0.5 * (size * math.log(2 * math.pi) - operator.logdet())
        return self.statistics.log_likelihood + prior + volume

    # --- the Gaussian of θ -------------------------------------------------------------------

    @property
    def gaussian(self) -> str:
        """Return which Gaussian over θ predictions use: "laplace" or "variational"."""
        return self.report.gaussian

    @property
    def mean(self) -> Tensor:
        """Return the mean of θ (P,): m of a variational Gaussian, or θ̂."""
        return self.theta if self.variational is None else self.variational.mean

    @property
    def sums(self) -> Statistics:
        """Return the sums over the data from which `covariance` follows.

        They are those at θ̂, or the averages of a variational Gaussian.
        """
        return self.statistics if self.variational is None else self.variational.statistics

    @cached_property
    def covariance(self) -> Operator:
        """Return the covariance of θ: S of a variational Gaussian, or H⁻¹.

        Raises ValueError where its inverse is not positive definite.
        """
        if self.variational is None:
            return self.operator
        return self.sums.curvature.with_prior(self.bound_prior.precision(self.mean))

    @property
    def tilted(self) -> bool:
        """Return whether θ̂ counts as the mode, though it is not one.

        A variational Gaussian keeps the value that it was fitted with, also if `mode` changes.
        """
        return self.mode != POLISH if self.variational is None else self.variational.tilted

    @property
    def tilt(self) -> Tensor:
        """Return the vector (P,) that is subtracted from the gradient of the objective.

        The vector makes the mean of θ stationary, and is zero at a mode. The gradient is that of
        the Gaussian at hand: at θ̂, or averaged over the variational one, whose mean then is θ̂.
        """
        if not self.tilted:
            return torch.zeros_like(self.theta)
        return self.sums.gradient + self.bound_prior.gradient(self.mean)

    @cached_property
    def bound_prior(self) -> BoundPrior:
        """Return the prior over the flat θ (P,)."""
        return self.prior.bind(self.network.layout)

    @property
    def objective_prior(self) -> BoundPrior:
        """Return the prior in the objective of θ̂ and of every refit.

        It is flat under the additive convention, and the prior of the posterior otherwise.
        """
        return Flat().bind(self.network.layout) if self.convention == ADDITIVE else self.bound_prior

    @property
    def determinant_prior(self) -> BoundPrior:
        """Return the prior in the determinants of a refit.

        It is the prior of the posterior under the exact convention. It is flat under "paper" and
        "additive", which leave the prior out of the curvature.
        """
        if self.convention == EXACT:
            return self.bound_prior
        return Flat().bind(self.network.layout)

    @cached_property
    def operator(self) -> Operator:
        """Return H⁻¹ at θ̂, with H = Σ JᵀΛJ − ∇² log π.

        Under the additive convention H is without the prior's term. Raises ValueError where H is
        not positive definite.
        """
        if self.convention == ADDITIVE:
            return self.data_operator
        precision = self.bound_prior.precision(self.theta)
        try:
            return self.statistics.curvature.with_prior(precision)
        except ValueError as error:
            count = indefinite(precision)
            if not count:
                raise
            raise ValueError(
                f"{error} Here the prior is not log-concave in {count} directions at θ̂, and the "
                "data do not make up for it."
            ) from None

    @cached_property
    def data_operator(self) -> Operator:
        """Return S⁻¹ at θ̂, with S = Σ JᵀΛJ alone.

        The conventions that leave the prior out of the curvature use it. Raises ValueError where
        the data do not determine every parameter.
        """
        try:
            return self.statistics.curvature.with_prior(torch.zeros_like(self.theta))
        except ValueError as error:
            raise ValueError(
                f"convention={self.convention!r} leaves the prior out of the curvature, and the "
                f"data alone do not determine every parameter. Use convention='exact'. ({error})"
            ) from None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return a copy of θ̂ by parameter name; after `polish` it is not what the module holds."""
        return self.network.layout.unpack(self.theta.clone())

    @property
    def residual(self) -> float:
        """Return the distance √(gᵀH⁻¹g) of θ̂ from the mode, in posterior standard deviations.

        g is the gradient of the objective at θ̂. The distance is exact for a quadratic objective.
        """
        gradient = self.statistics.gradient + self.objective_prior.gradient(self.theta)
        return math.sqrt(max(float(gradient @ self.operator.solve(gradient)), 0.0))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickled copy: everything but the training data.

        A refit of the copy's weights needs WeightRefit(data=…).
        """
        return {**self.__dict__, "source": None}

    @property
    def follows_prior(self) -> bool:
        """Return whether the sums alone give the new mean of θ when the prior changes.

        For a variational Gaussian, whose sums are averages, the new mean is right to first order
        only.
        """
        return (
            self.updates_mode_from_sums if self.variational is None else not self.variational.tilted
        )

    @property
    def quadratic(self) -> bool:
        """Return whether ℓ_D is a quadratic that the statistics determine exactly.

        The mode can then move without another pass. This holds for Gaussian noise on a last layer
        with dense curvature, or with Kronecker factors: one Λ for all rows makes A ⊗ G/n exact.
        """
        exact = self.statistics.curvature.exact_for_one_precision
        return self.network.linear and self.likelihood.quadratic and exact

    @property
    def updates_mode_from_sums(self) -> bool:
        """Return whether the sums alone give the new θ̂ when prior, noise or data change.

        The objective is quadratic then, and a polished θ̂ is its mode, so that the mode of the
        changed objective is one Newton step away.
        """
        return self.quadratic and self.mode == POLISH

    # --- the outputs at x --------------------------------------------------------------------

    def linearised(
        self, x: Any, differentiable: bool = False, progress: bool | None = None
    ) -> Iterator[tuple[Tensor, Jacobian]]:
        """Yield f (B, C) at the mean of θ, and J at θ̂, for inputs x, a chunk at a time.

        differentiable: with the graph of x, if x requires a gradient. The graph of all chunks is
        then held. progress: as in `fit`. Raises ValueError where an output is not finite, is
        outside the likelihood's domain, or has no derivative in x although `differentiable` asks
        for it.
        """
        inputs = self.network.cast(as_inputs(x, differentiable))
        keeps_graph = (
            differentiable
            and torch.is_grad_enabled()
            and any(part.requires_grad for part in input_tensors(inputs))
        )

        # Outputs of a last layer are linear in θ, so they can be taken at the mean itself.
        is_linear = self.network.linear
        theta = self.mean if is_linear else self.theta
        chunks = self.network.chunks(inputs, self.memory_budget)
        for chunk in progress_bar(chunks, None, progress, "predict", "chunk"):
            f, J = self.network.linearise(chunk, theta, keeps_graph)
            if keeps_graph:
                _refuse_disconnected_outputs(f, chunk)
            check_finite(
                "The network's output",
                f,
                "Its own layers overflow there, or have no value: leave out these inputs.",
            )

            # Other weights: the outputs of the network linearised at θ̂, taken at the mean.
            if self.variational is not None and not is_linear:
                f = f.double() + J.double().push(self.mean - self.theta)
            self.likelihood.check_outputs(f)
            yield f, J if J.dtype.itemsize > 2 else J.double()  # squares overflow float16

    def answer_template(self, marginal: Marginal) -> Tensor:
        """Return an empty tensor with the dtype and the device that answers for `marginal` have.

        These are the model's. The dtype is float64 where the model's is too coarse: where its steps
        at a mean exceed COARSE standard deviations of y (float32 has steps of about 0.1 at 10⁶),
        where it cannot hold a variance, and always inside vmap.
        """
        f, K = marginal
        dtype, device = self.network.dtype, self.network.device
        centre, scale = self.likelihood.predictive.centre_and_deviation(f, K)

        # Under vmap no branch may depend on values.
        if is_inside_vmap(f):
            return torch.empty(0, dtype=torch.float64, device=device)
        limits = torch.finfo(dtype)
        coarse = limits.eps * centre.abs() > COARSE * scale
        infinite = K.diagonal(dim1=-2, dim2=-1) > limits.max
        if bool(coarse.any()) or bool(infinite.any()):
            dtype = torch.float64
        return torch.empty(0, dtype=dtype, device=device)

    def outputs_at(self, x: Inputs, differentiable: bool = False) -> Marginal:
        """Compute f̂ (N, C) and K (N, C, C) as `marginal`, but in float64 on the CPU.

        The library computes there; `marginal` converts for the user.
        """
        return join_chunks(
            self.network.outputs,
            [(f, self.covariance.covariance(J)) for f, J in self.linearised(x, differentiable)],
        )

    def iterate_means_and_roots(
        self, x: Inputs, differentiable: bool = False
    ) -> Iterator[tuple[Tensor, Root]]:
        """Yield f̂ (B, C) in float64 and R with R Rᵀ = K (B, C, C), a chunk at a time.

        K of all rows is never held. Raises as `linearised`.
        """
        for f, J in self.linearised(x, differentiable):
            yield f.double(), self.covariance.root(J)

    def __repr__(self) -> str:
        """Return one line with the size of the fit and how it was done."""
        report = self.report
        return (
            f"Posterior(n={report.n}, parameters={report.parameters}, "
            f"likelihood={report.likelihood}, structure={report.structure!r}, "
            f"mode={report.mode!r})"
        )


def _refuse_disconnected_outputs(f: Tensor, x: Inputs) -> None:
    """Raise ValueError if the network's outputs f (B, C) have no derivative in x.

    Without the error the user would get a gradient of zero, which looks like an answer.
    """
    variables = [part for part in input_tensors(x) if part.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if f.requires_grad:
        gradients = torch.autograd.grad(f.sum(), variables, retain_graph=True, allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "differentiable=True was asked for, but the network's outputs have no derivative in x. "
            "Likely causes: (a) torch.no_grad() or .detach() in its forward; (b) x is rounded or "
            "used as indices. Remedy: remove them, or give the numbers that the network is "
            "differentiable in."
        )


@in_plain_torch
def fit(
    model: nn.Module,
    data: Any,
    *,
    likelihood: Likelihood,
    prior: Prior | Distribution | None = None,
    validation: Any = None,
    weights: str | list[str] | tuple[str, ...] = LAST_LAYER,
    structure: str | Structure = "auto",
    mode: str | None = None,
    gaussian: str | None = None,
    output: Output = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Posterior:
    """Fit a Laplace posterior to a trained network, ready to predict distributions.

    Parameters
    ----------
    model:
        The trained network, in eval mode. It is copied, never written to.
    data:
        The training data: a DataLoader, (X, y) or (X, y, row weights) as tensors or arrays, or any
        iterable of such batches. Inputs may be tensors, tuples (called as model(*x)) or dicts
        (model(**x)). Row weights are frequencies: a row of weight 2 counts as if it were there
        twice.
    likelihood:
        What y is given the outputs: `ssla.likelihoods.Gaussian(noise="estimate")`, `Poisson()`, …
    prior:
        Over the free parameters: `ssla.priors.Gaussian(precision=1.0)`, …, or a torch.distributions
        distribution. If not given, a Gaussian with one precision for each layer, by the evidence
        and the scale of the trained weights; biases are centred on their trained values.
    validation:
        Rows that the network has not seen, in any form that `data` has, or a share of `data` to
        hold out (0.2), which says less if the network was trained on them. They choose the
        dispersion of the likelihood (noise, temperature of classes, overdispersion of counts; a
        given value is where the search starts), and what is not given of prior, mode and gaussian.
        Training rows cannot show that a network is over-confident. `posterior.report` says what
        these rows found.
    weights:
        "last_layer" (its bias included), "all" (frozen parameters, requires_grad=False, are left
        out and noted in the report; where all are frozen, all are taken), a module's name, or a
        list of parameter names.
    structure:
        "auto" (dense where it takes little time and memory, kfac otherwise; the report says which,
        and why), "dense", "kfac", "diag" or "low_rank", or an object such as
        `ssla.structures.LowRank(rank=50)`.
    mode:
        "polish" (θ̂ moves to the mode), "tilt" (the trained weights count as the mode) or "as_is".
        By default tilt. A last layer that is not trained is polished; the report says which of
        the two was chosen, and why.
    gaussian:
        "variational": the Gaussian nearest to the posterior in KL divergence, found in a few
        passes; or "laplace": the one at the mode, with the curvature there. By default variational,
        but for Gaussian noise, where they are the same.
    output:
        Which part of the network's answer holds the outputs, where it is not one tensor: a key or
        attribute ("logits"), an index (0), or a function of the answer.
    memory_budget:
        Bytes that intermediate results may take (1 GiB if not given).
    progress:
        Show how far the fit is: True (a bar; needs tqdm), False, or None: after two seconds, on a
        terminal only.

    Under an initialised `torch.distributed` group every rank gives its own shard, and all get the
    same posterior of all of them (see `ssla.distributed`).

    Raises TypeError or ValueError for arguments and data that cannot be used; docs/failures.md has
    causes and remedies.

    Example
    -------
    >>> noisy = ssla.likelihoods.Gaussian(noise="estimate")
    >>> post = ssla.fit(model, (X, y), likelihood=noisy)   # doctest: +SKIP
    >>> post.predict(X_new).interval(0.95)                 # doctest: +SKIP
    """
    with send_errors_to_ranks():
        budget = checked_budget(memory_budget)
        answer_part = check_output_argument(output)
        training, unseen = split_off_validation(data, validation)
        reader = Reader(
            training, model, checked_weights(weights), budget, progress, output=answer_part
        )
        plan = checked_plan(
            Posterior,
            share_data_among_ranks(reader),
            likelihood,
            prior,
            structure,
            mode,
            gaussian,
            budget,
        )

    if unseen is None:
        return fitting.fit(plan)

    # A number is the share of the training data that was held out.
    return choose_by_validation(plan, unseen, held_out=isinstance(validation, float))


@in_plain_torch
def ssla(posterior: Posterior, x: Inputs, y: Any, refit: WeightRefit | None = None) -> Increments:
    """Compute the increments of SSLA: for each y, refit all free weights on the data plus (x, y).

    There are three increments for each y, and `total`, their sum, is an un-normalised log density.
    y is (N,), or (N, k) for k candidates at each input;
    of D targets it is (N, D) or (N, k, D). There is one refit for each y. refit: its options; None:
    the defaults of WeightRefit.

    >>> ssla.ssla(posterior, x, y).total                     # doctest: +SKIP
    """
    return compute_increments_at(
        WeightRefit() if refit is None else refit, _checked_posterior(posterior), x, y
    )


@in_plain_torch
def assla(posterior: Posterior, x: Inputs, y: Any, refit: NoRefit | None = None) -> Increments:
    """Compute the increments of ASSLA, without a refit (θ̃ = θ̂): log p(y|f̂) − ½ log|I + ΛK|.

    The result is as that of `ssla`. y has the shapes that `ssla` takes. refit: its options; None:
    the defaults of NoRefit. By these Λ of the new row is the observed curvature, and K has the
    Fisher information of the training rows, which is the curvature that the posterior holds.
    `NoRefit(data_curvature="observed")` sums the observed one of the training rows, as the paper's
    Algorithm 2 is written. With Gaussian noise the result is the plug-in times a constant: it does
    not include the uncertainty of the network.
    """
    return compute_increments_at(
        NoRefit() if refit is None else refit, _checked_posterior(posterior), x, y
    )


@in_plain_torch
def explain(
    posterior: Posterior,
    x: Inputs,
    *,
    top: int | None = 10,
    by: str = "mean",
    reference: Any = None,
    data: Any = None,
) -> Explanation:
    """Explain why the prediction at x is unsure, without a refit.

    The answer says which training rows and inputs, and how much noise, doubt and prior. `influence`
    has the training rows that count most for each x: what each adds to the mean and to the variance
    of the outputs f. It is exact for a linear model with Gaussian noise, and an approximation
    otherwise, poorest for the most influential rows and better for gaussian="laplace" than for
    "variational". Features that were trained on the row are kept, so in a network the row's
    influence through them is not counted.

    `split` divides the variance of y: noise, doubt (epistemic), and the part of the doubt that the
    prior decides.

    `inputs` has, for a table x (N, D), how much the doubt falls when one input is set to its
    `reference` and the others stay. Inputs that act together share their effect in no particular
    way, the values need not add up to the doubt, and a row with one changed value may be unlike any
    real row.

    top: how many rows (None: all). by: "mean" or "variance", by which rows are ranked, in units of
    the outputs' variances. reference: a row (D,); the means of the training rows if not given.
    data: the training data, where the posterior does not hold them.

    Raises ValueError for another convention than the exact one and for arguments or data that do
    not fit, and TypeError for angles.

    >>> print(ssla.explain(post, x))                         # doctest: +SKIP
    """
    return explanations.explain(_checked_posterior(posterior), x, top, by, reference, data)


@in_plain_torch
def label_next(posterior: Posterior, pool: Inputs, targets: Inputs = None) -> LabelGains:
    """Rank the rows of a pool, to choose which one to label next, without a refit.

    The rank is by how much their label would reduce the mean doubt at the targets. The doubt is the
    variance of E[y|f], summed over the outputs. Its reduction does not depend on the label for
    Gaussian noise, where it is exact for a linear model. Otherwise it is what is expected to first
    order, with the Fisher information at f̂. The gains of several rows do not add up: add the new
    row with `posterior.update`, and ask again.

    pool: M inputs. targets: the inputs whose predictions should become surer; the pool itself if
    not given. The result has the gain of each row (M,), and `best`, the row with the largest.

    Raises ValueError for another convention than the exact one and for no rows, and TypeError for
    angles.

    >>> ssla.label_next(post, pool).best                     # doctest: +SKIP
    """
    return explanations.label_next(_checked_posterior(posterior), pool, targets)


def _checked_posterior(posterior: Posterior) -> Posterior:
    """Return the first argument of a public function unchanged.

    Raises TypeError if it is not a posterior.
    """
    if not isinstance(posterior, Posterior):
        raise TypeError(
            "The first argument must be a Posterior, as ssla.fit returns it, but is a "
            f"{type(posterior).__name__}."
        )
    return posterior
