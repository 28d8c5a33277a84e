"""What a posterior is: frozen values.

`State` holds them all; every package below `posterior` works on it.

A State holds a private copy of the network, so the user's module is neither needed unchanged nor
ever written to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssla._checks import batched, finite
from ssla.curvature import Dense, Kfac, LowRank, Operator, Structure
from ssla.curvature.jacobians import Jacobian
from ssla.curvature.memory import DEFAULT_BUDGET
from ssla.data import Inputs, Source, as_inputs, leaves
from ssla.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood, StudentT
from ssla.likelihoods.likelihood import LOG_2PI
from ssla.maths.digests import digest
from ssla.maths.progress import progress_bar
from ssla.maths.roots import Root
from ssla.network import Network, difference, fingerprint, marks, module_of
from ssla.priors import ADDITIVE, EXACT, BoundPrior, Flat, Prior, describe, indefinite

POLISH, TILT, AS_IS = "polish", "tilt", "as_is"
LAPLACE, VARIATIONAL = "laplace", "variational"
# subjects of notes
FIT, DATA, MOVED, ADDED, PRIOR, CONCAVITY, RANK, TUNING = (
    "fit",
    "data",
    "moved",
    "added",
    "prior",
    "concavity",
    "rank",
    "tuning",
)
NO_VALIDATION = (
    "validation   none: training rows cannot show over-confidence; give rows that the network has "
    "not seen as validation="
)
COARSE = 0.1  # standard deviations: a dtype whose steps are larger cannot hold the answers


class Note(str):
    """A line of a report, with its subject, by which a later change replaces or keeps it.

    Notes of old files have none.
    """

    subject: str

    def __new__(cls, text: str, subject: str = FIT) -> Note:
        note = super().__new__(cls, text)
        note.subject = subject
        return note

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.subject


def subject(note: str) -> str:
    return note.subject if isinstance(note, Note) else FIT


def without(notes: Iterable[str], *subjects: str) -> list[str]:
    """The notes on other subjects."""
    return [note for note in notes if subject(note) not in subjects]


class Marginal(NamedTuple):
    """The outputs at x as a Gaussian: mean f̂ (N, C), covariance K (N, C, C)."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the data at one θ. `merge` adds them."""

    n: int  # rows seen
    weight: float  # sum of the row weights (= n without weights)
    log_likelihood: float
    gradient: Tensor  # ∇ℓ_D (P,)
    curvature: Structure  # Σ JᵀΛJ

    def merge(self, other: Statistics) -> Statistics:
        """The sums over both data sets (at the same θ)."""
        return Statistics(
            self.n + other.n,
            self.weight + other.weight,
            self.log_likelihood + other.log_likelihood,
            self.gradient + other.gradient,
            self.curvature.merge(other.curvature),
        )

    def moved(self, step: Tensor, curvature: Structure | None = None) -> Statistics:
        """The sums at θ + step where ℓ_D is quadratic with exactly this curvature (by default
        the one of the sums).
        """
        push = (curvature or self.curvature).push(step)
        gain = float(step @ self.gradient) - 0.5 * float(step @ push)
        return replace(
            self, log_likelihood=self.log_likelihood + gain, gradient=self.gradient - push
        )

    def at_noise(self, noise: float | Tensor, log_likelihood: float) -> Statistics:
        """The sums of a Gaussian at `noise` times the noise, with its log likelihood there.

        One factor or (P,).
        """
        curvature = self.curvature.scaled(torch.ones_like(self.gradient) / noise)
        return replace(
            self,
            log_likelihood=log_likelihood,
            gradient=self.gradient / noise**2,
            curvature=curvature,
        )

    def at_mode(self, prior: BoundPrior, theta: Tensor) -> tuple[Tensor, Statistics]:
        """θ and the sums after one Newton step, which is exact where ℓ_D + log π is quadratic."""
        step = self.curvature.with_prior(prior.precision(theta)).solve(
            self.gradient + prior.gradient(theta)
        )
        return theta + step, self.moved(step)


@dataclass(frozen=True)
class Validation:
    """What rows that the network has not seen say, and what they chose.

    Log densities are means a row, in nats.
    """

    rows: int
    plug_in: float  # negative log density of the network itself
    scaled_plug_in: float  # the same with the dispersion that is best for these rows
    # of the predictive: each half of the rows under the setting that the other half chose
    predictive: float
    gain: float  # plug_in − predictive
    gain_error: float  # its standard error
    network_spread: (
        float  # factor on the dispersion (noise, temperature, …) that is best without doubt
    )
    words: str  # what that says of the network
    spread: float  # factor on the dispersion that was chosen beside the doubt
    precision: float  # factor on the prior precisions of the trained weights' scale that was chosen
    settings: int  # how many were compared
    coverage: dict[str, float]  # level -> share of rows inside the intervals or sets of that level
    held_out: bool = False  # whether the rows were a share of the training data
    mode: str = TILT  # the one that was chosen
    # By what the outputs of most rows are divided, for the length of their features; None: no row
    # is scaled by itself.
    row_scales: tuple[float, float] | None = None

    def lines(self) -> list[str]:
        """For a report."""
        seen = (
            "; the network may have seen them in its training, then they are too optimistic"
            if self.held_out
            else ""
        )
        words = f"{self.words}" if self.words else "the likelihood has no dispersion to choose"
        found = [
            f"validation   {self.rows:,} rows chose between {self.settings} settings{seen}",
            f"             negative log density a row: network {self.plug_in:.4g}, rescaled "
            f"{self.scaled_plug_in:.4g}, predictive {self.predictive:.4g} (cross-fitted; gain "
            f"{self.gain:.3g} ± {self.gain_error:.1g})",
            f"             {words}; {self._choice}",
        ]
        if self.row_scales is not None:
            low, high = self.row_scales
            found.append(
                "             its logits grow too fast with the length of the features: each "
                f"row's are divided by a number of its own, {low:.2g} to {high:.2g} for most of "
                "these rows"
            )
        if self.coverage:
            shares = ", ".join(
                f"{share:.1%} at {float(level):.0%}" for level, share in self.coverage.items()
            )
            found.append(f"             coverage: {shares}")
        return found

    @property
    def _choice(self) -> str:
        """What was chosen in the end."""
        if self.mode == POLISH:
            return (
                "these rows prefer the last layer fitted again on the training rows (polish), "
                f"with a factor of {self.spread:.3g}"
            )
        return f"beside the doubt a factor of {self.spread:.3g} was chosen"


@dataclass(frozen=True)
class Report:
    """What `fit` saw and did. `print(posterior.report)` is meant to be read."""

    n: int
    weight: float
    parameters: int
    names: tuple[str, ...]
    outputs: int
    likelihood: str
    structure: str
    blocks: dict[str, str]  # layer -> structure
    mode: str
    residual: float  # √(g₀ᵀH⁻¹g₀) before: distance to the mode in posterior standard deviations
    residual_after: float
    steps: int  # Newton steps of polish
    output_shift: float  # root mean square change of the outputs by polish, in units of the noise
    passes: int
    memory: int  # bytes of statistics and factorisation
    notes: tuple[str, ...] = ()
    prior: str = ""
    convention: str = EXACT  # where the prior enters
    output: str = ""  # the part of the network's answer that is f, if it is a part
    gaussian: str = LAPLACE  # which Gaussian over θ
    rounds: int = 0  # of a variational Gaussian: passes over the data or their stored features
    validation: Validation | None = None  # None: no rows that the network has not seen were given
    choice: str = ""  # why the structure was chosen, where none was asked for

    @property
    def residual_per_parameter(self) -> float:
        """`residual` / √P: about how many posterior standard deviations each parameter is off
        its mode.
        """
        return self.residual / math.sqrt(self.parameters)

    @property
    def _gaussian(self) -> str:
        if self.gaussian == VARIATIONAL:
            return (
                f"variational: nearest to the posterior in KL divergence, found in {self.rounds} "
                "passes"
            )
        return "laplace: at the mode, with the curvature there"

    def __str__(self) -> str:
        done = {
            POLISH: f"polished in {self.steps} Newton step{'s' * (self.steps != 1)}: residual now "
            f"{self.residual_after:.2g}, training outputs moved by "
            f"{self.output_shift:.2g} noise units (rms); your module is unchanged",
            TILT: "tilted: θ̂ is taken as the mode, the point prediction is your network's own",
            AS_IS: "taken as it is",
        }[self.mode]
        weighted = "" if math.isclose(self.weight, self.n) else f" (total weight {self.weight:g})"
        blocks = ", ".join(f"{name or 'network'}: {kind}" for name, kind in self.blocks.items())
        lines = [
            f"n seen       {self.n:,} rows{weighted}, {self.passes} "
            f"pass{'es' * (self.passes != 1)} over the data",
            f"parameters   {self.parameters:,} free "
            f"({', '.join(self.names[:4])}{', …' if len(self.names) > 4 else ''})",
            f"likelihood   {self.likelihood} on {self.outputs} output{'s' * (self.outputs != 1)}",
            f"structure    {self.structure} "
            f"({blocks}{f'; chosen: {self.choice}' if self.choice else ''})",
            f"prior        {self.prior or 'not described'} (convention: {self.convention})",
            f"residual     {self.residual:.3g} posterior sd from the mode "
            f"({self.residual_per_parameter:.2g} per parameter)",
            f"mode         {done}",
            f"gaussian     {self._gaussian}",
            f"memory       {self.memory / 2**20:.1f} MiB",
            *([f"output       {self.output} of the network's answer"] if self.output else []),
            *(self.validation.lines() if self.validation is not None else [NO_VALIDATION]),
            *(f"note         {note}" for note in self.notes),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class TuningHistory:
    """Every accepted point of an optimisation, first to last.

    Of a choice by validation rows: every setting that was scored, in the order of the search, then
    the chosen one.
    """

    objective: str
    names: tuple[str, ...]  # of the coordinates: "precision of head", "noise"
    points: Tensor  # (rounds + 1, d), in their own units (not logarithms)
    values: Tensor  # (rounds + 1,): log evidence, or minus a score: larger is better
    gradient: Tensor  # (d,) at the end, in the logarithms of the coordinates
    converged: bool
    at_bound: tuple[str, ...]  # coordinates that ended at the edge of their range
    evaluations: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        ends = ", ".join(
            f"{name} {float(a):.4g} → {float(b):.4g}"
            for name, a, b in zip(self.names, self.points[0], self.points[-1], strict=True)
        )
        lines = [
            f"{self.objective}  {float(self.values[0]):.6g} → {float(self.values[-1]):.6g} in "
            f"{len(self.values) - 1} rounds, {self.evaluations} evaluations"
            + ("" if self.converged else "; NOT converged"),
            ends,
        ]
        if self.at_bound:
            lines.append(f"at the edge of their range: {', '.join(self.at_bound)}")
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True, eq=False)
class Variational:
    """N(m, S), the Gaussian nearest to the posterior: S⁻¹ is the statistics' curvature plus the
    prior's.

    The statistics are averages over the Gaussian's own uncertainty: Σ E log p, Σ JᵀE[g], Σ JᵀE[Λ]J,
    with J at θ̂.
    """

    mean: Tensor  # m (P,)
    statistics: Statistics
    tilted: (
        # whether the averaged gradient at θ̂ is subtracted from the objective, so that m is θ̂
        bool
    )


@dataclass(frozen=True, eq=False)
class State:
    """p(θ | D) by a Gaussian: what `Posterior` wraps.

    θ̂ is the mode (or the trained weights), where the network is linearised and from which weights
    are refitted, and `statistics` are the sums there. `mean`, `sums` and `covariance` are of the
    Gaussian that predictions use: the one at the mode (Laplace), or the variational one.
    """

    network: Network
    likelihood: Likelihood
    prior: Prior
    theta: Tensor  # θ̂ (P,), float64
    statistics: Statistics  # at θ̂
    mode: str  # how θ̂ was chosen: POLISH, TILT or AS_IS
    report: Report
    memory_budget: int = DEFAULT_BUDGET
    source: Source | None = (
        None  # the training data, by reference: what a refit of the weights reads again
    )
    convention: str = EXACT  # where the prior enters: see `Posterior.with_prior`
    tuning_history: TuningHistory | None = None
    variational: Variational | None = None

    @property
    def gaussian(self) -> str:
        return self.report.gaussian

    @property
    def mean(self) -> Tensor:
        """The mean of θ (P,): m, or θ̂."""
        return self.theta if self.variational is None else self.variational.mean

    @property
    def sums(self) -> Statistics:
        """The sums over the data behind `covariance`."""
        return self.statistics if self.variational is None else self.variational.statistics

    @cached_property
    def covariance(self) -> Operator:
        """The covariance of θ: S, or H⁻¹."""
        if self.variational is None:
            return self.operator
        return self.sums.curvature.with_prior(self.bound_prior.precision(self.mean))

    @property
    def tilted(self) -> bool:
        """Whether θ̂ counts as the mode, though it is not one.

        A variational Gaussian keeps what it was fitted with.
        """
        return self.mode != POLISH if self.variational is None else self.variational.tilted

    @property
    def tilt(self) -> Tensor:
        """What is subtracted from the gradient of the objective (P,), so that the mean of θ is
        stationary; zero at a mode.

        The gradient is that of the Gaussian at hand: at θ̂, or averaged over the variational one,
        whose mean then is θ̂.
        """
        if not self.tilted:
            return torch.zeros_like(self.theta)
        return self.sums.gradient + self.bound_prior.gradient(self.mean)

    @cached_property
    def bound_prior(self) -> BoundPrior:
        return self.prior.bind(self.network.layout)

    @property
    def objective_prior(self) -> BoundPrior:
        """The prior in the objective of θ̂ and of every refit: none under the additive
        convention.
        """
        return Flat().bind(self.network.layout) if self.convention == ADDITIVE else self.bound_prior

    @cached_property
    def operator(self) -> Operator:
        """H⁻¹ of a refit, H = Σ JᵀΛJ − ∇² log π (without the prior under the additive
        convention).
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
        """S⁻¹, S = Σ JᵀΛJ alone: the curvature of the conventions that leave the prior out of
        it.
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
        """θ̂ by name (after `polish` not the module's own values)."""
        return self.network.layout.unpack(self.theta.clone())

    def linearised(
        self, x: Any, differentiable: bool = False, progress: bool | None = None
    ) -> Iterator[tuple[Tensor, Jacobian]]:
        """The outputs at the mean of θ and J (at θ̂) at x, a chunk at a time.

        differentiable: with the graph of x, if x requires a gradient. The graph of all chunks is
        then held.
        """
        inputs = self.network.cast(as_inputs(x, differentiable))
        graph = (
            differentiable
            and torch.is_grad_enabled()
            and any(part.requires_grad for part in leaves(inputs))
        )
        for part in progress_bar(
            self.network.chunks(inputs, self.memory_budget), None, progress, "predict", "chunk"
        ):
            f, J = self.network.linearise(
                part, self.mean if self.network.linear else self.theta, graph
            )
            if graph:
                _refuse_disconnected(f, part)
            finite(
                "The network's output",
                f,
                "Its own layers overflow there, or have no value: leave out these inputs.",
            )
            if self.variational is not None and not self.network.linear:
                f = f.double() + J.double().push(self.mean - self.theta)
            self.likelihood.check_outputs(f)
            yield f, J if J.dtype.itemsize > 2 else J.double()  # squares overflow float16

    def marginal(self, x: Inputs, differentiable: bool = False) -> Marginal:
        """f̂ (N, C) and K = J H⁻¹ Jᵀ (N, C, C), in bounded memory for any N, in the dtype of
        `like`.
        """
        found = self.outputs_at(x, differentiable)
        return Marginal(*(part.to(self.like(found)) for part in found))

    def like(self, marginal: Marginal) -> Tensor:
        """Answers are given in this tensor's dtype and on its device: the model's.

        Float64 where the model's dtype would round a mean by more than a twentieth of the noise: a
        noise of 0.01 at outputs of 10⁶ has no place in float32.
        """
        dtype, law = self.network.dtype, self.likelihood.predictive
        f, K = marginal
        if isinstance(law, Gaussian):
            scale = (law.covariance_for(f) + K).diagonal(dim1=-2, dim2=-1).sqrt()
        elif isinstance(law, HeteroscedasticGaussian | StudentT):
            centre, scale = law.guess(f, K)
            f = centre
        else:
            scale = torch.full_like(f, torch.inf)
        limits = torch.finfo(dtype)
        if batched(f):
            return torch.empty(0, dtype=torch.float64, device=self.network.device)
        coarse = limits.eps * f.abs() > COARSE * scale
        infinite = K.diagonal(dim1=-2, dim2=-1) > limits.max
        if bool(coarse.any()) or bool(infinite.any()):
            dtype = torch.float64
        return torch.empty(0, dtype=dtype, device=self.network.device)

    def outputs_at(self, x: Inputs, differentiable: bool = False) -> Marginal:
        """`marginal` in float64 on the CPU, where everything else is computed."""
        return self._joined(
            [(f, self.covariance.covariance(J)) for f, J in self.linearised(x, differentiable)]
        )

    def roots_at(self, x: Inputs, differentiable: bool = False) -> Iterator[tuple[Tensor, Root]]:
        """f̂ (B, C) in float64 and R with R Rᵀ = K, a chunk at a time: K of all rows is never
        held.
        """
        for f, J in self.linearised(x, differentiable):
            yield f.double(), self.covariance.root(J)

    def prior_response(self, x: Inputs) -> Marginal:
        """What a refit does to log π, to second order: mean b = J H⁻¹ ∇log π, covariance J H⁻¹ (−∇²
        log π) H⁻¹ Jᵀ.

        A refit that moves the outputs by K u moves θ by H⁻¹Jᵀu and log π by bᵀu − ½ uᵀ(·)u.
        """
        pull = self.covariance.solve(self.bound_prior.gradient(self.mean))
        middle = self.bound_prior.precision(self.mean)
        return self._joined(
            [(J.push(pull), _response(self.covariance, J, middle)) for _, J in self.linearised(x)]
        )

    def data_covariance(self, x: Inputs) -> Tensor:
        """J S⁻¹ Jᵀ (N, C, C) in float64: what the determinant of the paper's convention takes."""
        return self._joined(
            [(f, self.data_operator.covariance(J)) for f, J in self.linearised(x)]
        ).covariance

    def _joined(self, parts: list[tuple[Tensor, Tensor]]) -> Marginal:
        """Chunks -> all rows, in float64; no chunk -> no rows."""
        C = self.network.outputs
        none = (torch.empty(0, C, dtype=torch.float64), torch.empty(0, C, C, dtype=torch.float64))
        return Marginal(
            *(torch.cat(column).double() for column in zip(*(parts or [none]), strict=True))
        )

    def log_evidence(self) -> float:
        """Laplace: ℓ_D(θ̂) + log π(θ̂) + (P/2) log 2π − ½ log|H|. Exact for linear Gaussian models.

        H holds the prior's curvature under the exact convention only. Of a variational Gaussian it
        is the evidence bound Σ E log p + E log π + ½ log|S| + (P/2)(1 + log 2π), with the prior to
        second order around m.
        """
        size = self.theta.numel()
        if self.variational is not None:
            return evidence_bound(self, self.mean, self.covariance, self.sums.log_likelihood)
        prior = float(self.bound_prior.log_prob(self.theta))
        operator = self.operator if self.convention == EXACT else self.data_operator
        return (
            self.statistics.log_likelihood
            + prior
            + 0.5 * (size * math.log(2 * math.pi) - operator.logdet())
        )

    @property
    def follows_prior(self) -> bool:
        """Whether the mean of θ can follow when the prior changes, from the sums alone (to
        first order if they are averages).
        """
        return self.follows_mode if self.variational is None else not self.variational.tilted

    def with_sums(self, statistics: Statistics) -> State:
        """The same Gaussian's mean with other sums."""
        if self.variational is None:
            return replace(self, statistics=statistics)
        return replace(self, variational=replace(self.variational, statistics=statistics))

    def recentred(self) -> State:
        """The variational Gaussian with its averages kept as they are, and m where they and the
        prior put it.

        Averages that are kept stand for a likelihood that is quadratic around m, with the curvature
        of the structure: exact to first order in what changed where the structure is dense. A
        tilted Gaussian stays where it is.
        """
        here = self.variational
        assert here is not None
        if self.tilted:
            return self
        step = self.covariance.solve(self.sums.gradient + self.bound_prior.gradient(self.mean))
        return replace(
            self,
            variational=replace(
                here, mean=here.mean + step, statistics=here.statistics.moved(step)
            ),
        )

    @property
    def quadratic(self) -> bool:
        """Whether the statistics determine ℓ_D exactly (a quadratic), so that the mode can move
        without another pass.

        So it is for Gaussian noise on a last layer, dense or by Kronecker factors: one Λ for all
        rows makes A ⊗ G/n exact.
        """
        whole = isinstance(self.statistics.curvature, Dense | Kfac)
        return self.network.linear and isinstance(self.likelihood, Gaussian) and whole

    @property
    def follows_mode(self) -> bool:
        """Whether θ̂ can follow the mode when prior, noise or data change, from the statistics
        alone.
        """
        return self.quadratic and self.mode == POLISH

    def merge(self, other: State) -> State:
        """The state of both data sets (see Posterior.merge)."""
        self._refuse_unlike(other)
        statistics = other.statistics
        if not torch.equal(self.theta, other.theta):
            if not self.quadratic:
                raise ValueError(
                    "The two posteriors are at different modes, and their statistics cannot be "
                    "moved. Fit every shard with mode='tilt'."
                )
            statistics = statistics.moved(self.theta - other.theta)
        both = self.with_more(statistics, other.source, other.report.passes, other.report.notes)
        if self.variational is None:
            return both
        # Both sums are taken at θ̂, so that the order does not matter.
        mine, theirs = (state.sums.moved(state.theta - state.mean) for state in (self, other))
        return replace(
            both, variational=Variational(self.theta, mine.merge(theirs), self.tilted)
        ).recentred()

    def _refuse_unlike(self, other: State) -> None:
        """ValueError unless the sums of both are of one model, so that they may be added."""
        for what in ("names", "outputs", "output", "structure", "mode", "convention", "gaussian"):
            mine, theirs = getattr(self.report, what), getattr(other.report, what)
            if mine != theirs:
                raise ValueError(
                    f"Only posteriors alike can be merged, but their {what} differ: {mine} and "
                    f"{theirs}."
                )
        ours, others = marks(self.network), marks(other.network)
        odd = [what for what in ours if ours[what] != others[what]]
        if odd:
            why = difference(*(fingerprint(module_of(post.network)) for post in (self, other)))
            parts = f"{' and '.join(odd)} differ{why and ': '}{why}"
            raise ValueError(
                f"Only posteriors of the same trained network can be merged, but their {parts}."
            )
        for what, mine, theirs in (
            ("likelihoods", self.likelihood, other.likelihood),
            ("priors", self.bound_prior, other.bound_prior),
        ):
            if digest(mine) != digest(theirs):
                pair = (
                    f"{describe(getattr(self, what[:-1]))} and "
                    f"{describe(getattr(other, what[:-1]))}"
                )
                raise ValueError(
                    f"Only posteriors with the same {what} can be merged, but the {what} differ, "
                    f"if only in digits that are not shown: {pair}. Fit every shard with the same "
                    "one; an estimated noise as the number that one shard found."
                )

    def with_more(
        self,
        statistics: Statistics,
        source: Source | None,
        passes: int,
        notes: tuple[str, ...] = (),
    ) -> State:
        """The state with the sums of more data at θ̂: at the new mode where the statistics
        determine it, else at θ̂.
        """
        theta, whole = self.theta, self.statistics.merge(statistics)
        note = "data were added: θ̂ was kept, and is no longer the mode of all of them"
        if self.variational is not None:
            what = (
                "its covariance has changed and its mean stayed"
                if self.tilted
                else "the Gaussian has moved"
            )
            note = f"data were added: {what}, the averages over the earlier rows and θ̂ were kept"
        if self.follows_mode:
            (theta, whole), note = (
                whole.at_mode(self.objective_prior, theta),
                "data were added: moved to the mode of all of them",
            )
        both = None if self.source is None or source is None else self.source.then(source)
        moved = replace(self, theta=theta, statistics=whole, source=both)
        before = without(dict.fromkeys((*self.report.notes, *notes)), ADDED)  # once each
        kept = [
            Note(f"before data were added: {n}") if subject(n) in (DATA, MOVED) else n
            for n in before
        ]
        report = replace(
            self.report,
            n=whole.n,
            weight=whole.weight,
            passes=self.report.passes + passes,
            residual_after=moved.residual,
            notes=(*with_directions(kept, moved), Note(note, ADDED)),
        )
        return replace(moved, report=report)

    def at_noise(self, factor: float) -> State:
        """The same θ̂ with `factor` times the noise: the sums rescale, exactly."""
        old = self.likelihood
        if factor == 1.0 or not isinstance(old, Gaussian):
            return self
        stats, outputs = self.statistics, self.network.outputs
        squares = residual_squares(stats, old, outputs)
        new = old.dispersed(factor)
        log_likelihood = (
            stats.log_likelihood
            + 0.5 * squares * (1 - factor**-2)
            - stats.weight * outputs * math.log(factor)
        )
        return replace(self, likelihood=new, statistics=stats.at_noise(factor, log_likelihood))

    @property
    def residual(self) -> float:
        """√(gᵀH⁻¹g): how far θ̂ is from the mode of the objective, in posterior standard
        deviations.
        """
        gradient = self.statistics.gradient + self.objective_prior.gradient(self.theta)
        return math.sqrt(max(float(gradient @ self.operator.solve(gradient)), 0.0))

    def __getstate__(self) -> dict[str, Any]:
        """Copies travel without the training data: a refit of the weights then needs
        WeightRefit(data=…).
        """
        return {**self.__dict__, "source": None}


def _refuse_disconnected(f: Tensor, x: Inputs) -> None:
    """ValueError if the network's outputs have no derivative in x, which a zero gradient would
    hide.
    """
    free = [part for part in leaves(x) if part.requires_grad]
    found = (
        torch.autograd.grad(f.sum(), free, retain_graph=True, allow_unused=True)
        if f.requires_grad
        else ()
    )
    if all(gradient is None for gradient in found):
        raise ValueError(
            "differentiable=True was asked for, but the network's outputs have no derivative in x. "
            "Likely causes: (a) torch.no_grad() or .detach() in its forward; (b) x is rounded or "
            "used as indices. Remedy: remove them, or give the numbers that the network is "
            "differentiable in."
        )


def evidence_bound(
    state: State, mean: Tensor, covariance: Operator, log_likelihood: float
) -> float:
    """The bound of N(mean, covariance), with its average log likelihood, under a state's prior."""
    bound = state.bound_prior
    prior = float(bound.log_prob(mean)) - 0.5 * float(
        prior_share(covariance, bound.precision(mean)).sum()
    )
    entropy = 0.5 * (len(mean) * (1 + math.log(2 * math.pi)) - covariance.logdet())
    return log_likelihood + prior + entropy


def prior_share(operator: Operator, precision: Tensor) -> Tensor:
    """diag(T H⁻¹) (P,): how much of each parameter the prior decides."""
    if precision.dim() == 1:
        return precision * operator.variances()
    return torch.stack([operator.solve(row) for row in precision]).diagonal()


def residual_squares(statistics: Statistics, likelihood: Likelihood, outputs: int) -> float:
    """Σ w rᵀΣ⁻¹r from ℓ: a Gaussian's log likelihood is −½ of it plus constants."""
    assert isinstance(likelihood, Gaussian)
    sigma = likelihood.covariance_for(torch.zeros(outputs, dtype=torch.float64))
    logdet = 2 * float(torch.linalg.cholesky(sigma).diagonal().log().sum())
    return max(
        -2 * statistics.log_likelihood - statistics.weight * (outputs * LOG_2PI + logdet), 0.0
    )


def with_directions(notes: list[str], posterior: State) -> list[str]:
    """The notes with what a low-rank curvature leaves out now, under its present data and prior."""
    found, least = (
        posterior.statistics.curvature,
        float(posterior.bound_prior.precision(posterior.theta).min()),
    )
    kept = without(notes, RANK)
    return (
        [*kept, Note(found.note(least), RANK)] if isinstance(found, LowRank) and least > 0 else kept
    )


def _response(operator: Operator, J: Jacobian, middle: Tensor) -> Tensor:
    """J H⁻¹ M H⁻¹ Jᵀ for any symmetric M: a diagonal (P,) of either sign, or a full matrix by
    its eigenvectors.
    """
    if middle.dim() == 1:
        plus = operator.response(J, middle.clamp_min(0))
        return (
            plus
            if bool((middle >= 0).all())
            else plus - operator.response(J, (-middle).clamp_min(0))
        )
    values, vectors = torch.linalg.eigh(middle)
    moves = torch.stack([J.push(operator.solve(v)).double() for v in vectors.mT], -1)  # (B, C, P)
    whole: Tensor = (moves * values) @ moves.mT
    return whole
