"""SSLA: a real refit of the weights on all of the data plus (x, y), for every candidate y."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla._checks import one_of, warn
from ssla.data import Inputs, as_inputs, row_count
from ssla.likelihoods import Likelihood
from ssla.maths.progress import delay_of, tqdm_class, wanted
from ssla.priors import BoundGaussian
from ssla.refit.increments import FISHER, OBSERVED, Increments
from ssla.refit.outputs import Density, OutputLogDensity, OutputRefit
from ssla.refit.weights.all_weights import open_all_weights
from ssla.refit.weights.all_weights_dual import MOST_OUTPUTS, bytes_needed, fits
from ssla.refit.weights.anderson import Progress
from ssla.refit.weights.determinants import SMALL
from ssla.refit.weights.last_layer import open_last_layer
from ssla.refit.weights.last_layer_blocks import vectors_that_fit
from ssla.refit.weights.last_layer_curvature import factor_bytes
from ssla.refit.weights.last_layer_products import SINGLE_TOLERANCE, is_large, open_products
from ssla.refit.weights.linearised import default_logdet, open_linearised, why_not_linearised
from ssla.refit.weights.solved import (
    EXACT,
    FROZEN,
    HESSIAN,
    LOGDETS,
    STRUCTURE,
    TRACES,
    Engine,
    Options,
    Solved,
)
from ssla.report import POLISH
from ssla.values import Marginal

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# posterior standard deviations per parameter: nearer to the mode, more training is no remedy
AT_MODE = 0.01
RARE = 1e-3  # probability of a class
# A guess, for classes of a large last layer: their determinants have a larger error.
LARGE_TOLERANCE = 5e-4
TRIALS = 3  # refits that are tried before many
FALLBACK, NAN, RAISE = "fallback", "nan", "raise"
FAILURES = (FALLBACK, NAN, RAISE)
CURVATURES = (OBSERVED, FISHER, HESSIAN)
NO_STRUCTURE = (
    "Refits of the linearised network have no logdet='structure'. Use 'exact', 'traces' or "
    "'frozen'."
)


@dataclass(frozen=True, eq=False)
class WeightRefit:
    """θ̃(y) = argmax ℓ_D(θ) + log p(y|x,θ) + log π(θ) − g₀ᵀ(θ − θ̂), then the three increments at
    θ̃ (docs/design.md).

    All (x, y) are solved together, deterministically. g₀, the gradient at θ̂, makes θ̂ the mode
    without (x, y); after mode="polish" it is zero to rounding, with mode="as_is" it is left out.

    Fails where θ̂ is not a maximum, as in large networks trained on few rows or not to their end:
    there is no mode near it to find (docs/refits.md). Of many refits of a network the three easiest
    are tried first: if none of them makes progress, the network linearised at θ̂ is refitted in its
    place, with a warning, where that is possible (see `linearised`). Other refits that fail fall
    back as `on_failure` sets, with a warning that counts them.

    Parameters
    ----------
    tolerance:
        A task is done when √(gᵀH⁻¹g), its distance from the mode in posterior standard deviations,
        is below it. Default: 1e-8, for classes 1e-4 (log probabilities are then off by about 1e-4).
    rare:
        Classes that the output refit gives a smaller probability have no refit of their own: their
        log probability changes as that of the rarest class of the same input that has one. Most
        classes of an input are such. 0 refits every class. Default: 1e-3.
    max_steps:
        Gradient evaluations for each task before it counts as failed.
    curvature:
        Of every row, in both determinants: "observed" (default; the exact Hessian of a last layer),
        "fisher" (the generalised Gauss–Newton), or "hessian" (with the network's second
        derivatives, for few weights). Where it is indefinite at the end, that task uses the Fisher
        and is counted.
    logdet:
        "exact" at θ̃ (default for few weights and for a last layer whose P×P matrices fit the
        memory budget; many weights on few rows have it too), "traces" (default for a larger last
        layer: exact to first order, the rest by random vectors with a stated error in
        `diagnostics.error`; beyond what a single P×P matrix allows, from blocks of it, one for each
        output, corrected by random vectors; beyond that by the fitted structure, with an error that
        is not known), "frozen" (at θ̂, plus the new point's own part: an error of O(1/n), but large
        at a y far out; default otherwise), or "structure" (the fitted structure at θ̃; a pass over
        the data for each task).
    linearised:
        True refits the network linearised at θ̂, f_i = f̂_i + J_i(θ − θ̂) on all rows. For Gaussian
        priors and concave likelihoods each such refit has a mode. Its determinants are exact for at
        most 2,000 training rows × outputs, and have a stated error beyond (logdet="traces"). False
        never does so. Default: where the network itself has no mode near θ̂, the memory budget
        allows it, and on_failure is "fallback". A last layer is linear; the option changes nothing
        there.
    on_failure:
        For a task that does not reach its mode: "fallback" (take the output refit's answer, and
        count it in `diagnostics`), "nan", or "raise".
    data:
        The training data, where the posterior does not hold them (fitted from a generator, loaded
        from a file).
    interpolation:
        The error allowed in log density, before normalisation, when a whole predictive is drawn
        from few refits (inside its 99.9% region).
    progress:
        Show a bar over the tasks, with the gradients taken so far: True (needs tqdm), False, or
        None: after two seconds, on a terminal only, where tqdm is installed.
    """

    tolerance: float | None = None
    rare: float | None = None
    max_steps: int = 100
    curvature: str | None = None
    logdet: str | None = None
    on_failure: str = FALLBACK
    data: Any = None
    interpolation: float = 1e-4
    progress: bool | None = None
    linearised: bool | None = None

    name = "weights"

    def __post_init__(self) -> None:
        if self.rare is not None and (isinstance(self.rare, bool | str) or not 0 <= self.rare < 1):
            raise ValueError(
                f"rare must be a number from 0 and below 1, for example 1e-4, but is {self.rare!r}."
            )
        for what, value in (("tolerance", self.tolerance), ("interpolation", self.interpolation)):
            if value is not None and (isinstance(value, bool | str) or not 0 < value < 1):
                raise ValueError(
                    f"{what} must be a number between 0 and 1, for example 1e-8, but is {value!r}."
                )
        if (
            isinstance(self.max_steps, bool)
            or not isinstance(self.max_steps, int)
            or self.max_steps < 1
        ):
            raise ValueError(f"max_steps must be a whole number from 1, but is {self.max_steps!r}.")
        if self.curvature is not None:
            one_of("curvature", self.curvature, CURVATURES)
        if self.logdet is not None:
            one_of("logdet", self.logdet, LOGDETS)
        one_of("on_failure", self.on_failure, FAILURES)
        if not (self.linearised is None or isinstance(self.linearised, bool)):
            raise ValueError(
                f"linearised must be True, False or None (automatic), but is {self.linearised!r}."
            )

    def __call__(self, posterior: Posterior, x: Inputs) -> WeightLogDensity:
        if posterior.convention != "exact":
            raise ValueError(
                "A refit of the weights works with the exact convention only, but this posterior "
                f"has convention={posterior.convention!r}. Use refit='output', 'newton' or 'none', "
                "or posterior.with_prior(posterior.prior); models of a few parameters have all "
                "conventions in ssla.ExplicitModel."
            )
        output = OutputRefit()(posterior, x)
        return WeightLogDensity(self, posterior, x, output)

    def engine(self, posterior: Posterior, x: Inputs) -> Engine:
        """Stage one: what does not depend on y."""
        if posterior.network.linear:
            options = self._last_layer(posterior)
            if self._by_products(posterior):
                return open_products(posterior, x, options, self.data, self._single(posterior))
            return open_last_layer(posterior, x, options, self.data)
        if self.linearised:
            return self.linearised_engine(posterior, x)
        return open_all_weights(posterior, x, self._all_weights(posterior), self.data)

    def linearised_engine(self, posterior: Posterior, x: Inputs) -> Engine:
        """Stage one of refits of the network linearised at θ̂; ValueError where they are not
        possible.
        """
        if self.logdet == STRUCTURE:
            raise ValueError(NO_STRUCTURE)
        # The Hessian of outputs that are linear in the weights is the observed curvature.
        curvature = FISHER if self.curvature == FISHER else OBSERVED
        logdet = self.logdet or default_logdet(posterior)
        options = Options(self._tolerance(posterior), self.max_steps, curvature, logdet, memory=6)
        return open_linearised(posterior, x, options, self.data, self._single(posterior))

    def why_not_linearised(self, posterior: Posterior, x: Inputs) -> str | None:
        """Why the linearised network cannot take the place of the network; None where it can."""
        if self.linearised is False:
            return "linearised=False rules out refits of the linearised network."
        # Who asks for an error or for NaN wants to know that the network itself has no mode.
        if self.on_failure != FALLBACK:
            return (
                "ssla.WeightRefit(linearised=True) refits the network linearised at these weights."
            )
        if self.logdet == STRUCTURE:
            return NO_STRUCTURE
        return why_not_linearised(posterior, row_count(as_inputs(x)), self._single(posterior))

    def _tolerance(self, posterior: Posterior) -> float:
        if self.tolerance is not None:
            return self.tolerance
        return 1e-4 if self._of_classes(posterior) else 1e-8

    def _of_classes(self, posterior: Posterior) -> bool:
        return posterior.likelihood.support_for(posterior.network.outputs).kind == "class"

    def _last_layer(self, posterior: Posterior) -> Options:
        if self.logdet == STRUCTURE:
            raise ValueError(
                "logdet='structure' is for weights='all'; a last layer has its exact curvature: "
                "use 'exact' or 'frozen'."
            )
        # f is linear: the observed is the Hessian
        curvature = OBSERVED if self.curvature in (None, HESSIAN) else self.curvature
        assert curvature is not None
        size = posterior.theta.numel()
        by_products = self._by_products(posterior)
        if by_products:
            self._need_gaussian_prior(posterior)
            if self.logdet is None:
                self._check_size(posterior)
        else:
            instead = "logdet='traces', refit='output'"
            _within_budget(
                f"A refit of a last layer with {size:,} parameters",
                dense_bytes(posterior),
                posterior,
                instead,
            )
        logdet = self.logdet or (TRACES if by_products else EXACT)
        tolerance = self._tolerance(posterior)
        if (
            self.tolerance is None
            and self._single(posterior)
            and by_products
            and is_large(posterior)
        ):
            tolerance = LARGE_TOLERANCE
        return Options(tolerance, self.max_steps, curvature, logdet, memory=6 if by_products else 4)

    def _check_size(self, posterior: Posterior) -> None:
        """ValueError where neither a shared P×P matrix nor blocks of it fit the memory budget.

        Determinants then come from the fitted structure, and may be off by 0.1: only where asked
        for.
        """
        outputs = posterior.network.outputs
        width = posterior.theta.numel() // outputs
        dtype = torch.float32 if self._single(posterior) else torch.float64
        if vectors_that_fit(
            posterior.statistics.n, outputs, width, dtype.itemsize, posterior.memory_budget
        ):
            return
        need = factor_bytes(outputs, width, dtype)
        instead = (
            "refit='output', or logdet='traces' (determinants of the fitted structure, which may "
            "be off by 0.1)"
        )
        _within_budget(
            f"A refit of a last layer with {posterior.theta.numel():,} parameters",
            need,
            posterior,
            instead,
        )

    def _by_products(self, posterior: Posterior) -> bool:
        """Whether a last layer is refitted without a P×P matrix for each task: as asked for, or
        because none fits.

        Priors that are not Gaussian have the dense engine only.
        """
        if self.logdet in (EXACT, TRACES):
            return self.logdet == TRACES
        gaussian = isinstance(posterior.bound_prior, BoundGaussian)
        return gaussian and dense_bytes(posterior) > posterior.memory_budget

    def _need_gaussian_prior(self, posterior: Posterior) -> None:
        """ValueError unless the prior is Gaussian, which refits by products with features need."""
        if not isinstance(posterior.bound_prior, BoundGaussian):
            raise ValueError(
                "logdet='traces' needs a Gaussian prior, whose curvature is the same everywhere, "
                f"but this posterior has {posterior.report.prior}. Use logdet='exact', "
                "ssla.priors.Gaussian, or refit='output'."
            )

    def _single(self, posterior: Posterior) -> bool:
        """Whether products are in single precision: classes, which have no rounding, at a
        tolerance that it meets.
        """
        return self._tolerance(posterior) >= SINGLE_TOLERANCE and self._of_classes(posterior)

    def _all_weights(self, posterior: Posterior) -> Options:
        size = posterior.theta.numel()
        if self.logdet == TRACES:
            raise ValueError(
                "logdet='traces' is for a last layer. For weights='all' use 'exact', 'frozen' or "
                "'structure'."
            )
        logdet = self.logdet or (EXACT if size <= SMALL else FROZEN)
        curvature = self.curvature or OBSERVED
        if size > SMALL and curvature == HESSIAN and logdet != STRUCTURE:
            raise ValueError(
                f"curvature='hessian' forms a P×P matrix for each refit and is for at most {SMALL} "
                f"weights, but this posterior has {size:,}. Use curvature='observed' or 'fisher'."
            )
        if size > SMALL and logdet == EXACT and not fits(posterior):
            raise ValueError(
                f"logdet='exact' is for at most {SMALL} weights, or for at most {MOST_OUTPUTS:,} "
                "rows times outputs under a proper Gaussian prior, but this posterior has "
                f"{size:,} weights, {posterior.statistics.n:,} rows and "
                f"{posterior.network.outputs} outputs. Use logdet='frozen' (an error of O(1/n)) or "
                "logdet='structure'."
            )
        if size > SMALL and logdet == EXACT:
            _within_budget(
                f"logdet='exact' for {size:,} weights",
                bytes_needed(posterior),
                posterior,
                "logdet='frozen'",
            )
        return Options(self._tolerance(posterior), self.max_steps, curvature, logdet, memory=12)


def dense_bytes(posterior: Posterior) -> int:
    """What refits of a last layer with P×P matrices need: six of them."""
    return 8 * 6 * posterior.theta.numel() ** 2


def _within_budget(what: str, need: int, posterior: Posterior, instead: str) -> None:
    if need > posterior.memory_budget:
        raise ValueError(
            f"{what} needs {need / 2**30:.2g} GiB for its curvature, more than the memory budget "
            f"of {posterior.memory_budget / 2**30:.2g} GiB. Use {instead}, or fit with a larger "
            "memory_budget."
        )


@contextmanager
def _progress(count: int, show: bool | None) -> Iterator[Progress | None]:
    """A progress bar over tasks, if it is to be shown.

    It counts the tasks that converged and the gradients taken so far.
    """
    tqdm = tqdm_class(required=show is True) if wanted(show) else None
    if tqdm is None:
        yield None
        return
    with tqdm(total=count, desc=f"{count:,} refits", unit="refit", delay=delay_of(show)) as bar:
        rounds = 0

        def progress(done: int) -> None:
            nonlocal rounds
            rounds += 1
            bar.set_postfix_str(f"{rounds:,} gradients", refresh=False)
            bar.update(done)

        yield progress


@dataclass(frozen=True, eq=False)
class WeightLogDensity:
    """Refits at fixed inputs, for any y.

    Every y costs a refit; `ssla.predictive.interpolation` needs few for a density.
    """

    refit: WeightRefit
    posterior: Posterior
    x: Inputs
    output: (
        OutputLogDensity  # the output refit: where refits start from, and the fallback of failures
    )

    moves = True

    @property
    def likelihood(self) -> Likelihood:
        return self.output.likelihood

    @property
    def marginal(self) -> Marginal:
        return self.output.marginal

    @property
    def like(self) -> Tensor:
        return self.output.like

    @property
    def exact(self) -> bool:
        """Whether the output rung gives the same answer: Gaussian noise, linear, dense, a
        Gaussian prior.
        """
        return self.posterior.quadratic and isinstance(self.posterior.bound_prior, BoundGaussian)

    @cached_property
    def _engine(self) -> Engine:
        return self.refit.engine(self.posterior, self.x)

    @cached_property
    def _linearised_engine(self) -> Engine:
        """What takes the place of `_engine` where the network has no mode near θ̂."""
        self.__dict__.pop("_engine", None)  # it holds the Jacobians at x
        return self.refit.linearised_engine(self.posterior, self.x)

    @property
    def _current(self) -> Engine:
        return self._linearised_engine if self.replaced else self._engine

    @property
    def replaced(self) -> bool:
        """Whether the linearised network is refitted because the network itself has no mode
        near θ̂.
        """
        return self._no_mode_found and self._why_not_linearised is None

    @property
    def linearised(self) -> bool:
        """Whether refits are those of the linearised network, asked for or not."""
        return self.replaced or (
            self.refit.linearised is True and not self.posterior.network.linear
        )

    @cached_property
    def _why_not_linearised(self) -> str | None:
        return self.refit.why_not_linearised(self.posterior, self.x)

    def solve(self, y: Tensor, rows: Tensor | None = None) -> Solved:
        """The refits themselves: y (m, …) or (m, k, …) of rows (m,) -> all of the shape of y, flat.

        Failures are not replaced.
        """
        where, flat = self._tasks(y, rows)
        if not len(where):
            return Solved.untried(0)
        self._try_easiest(where, flat, y, rows)
        if self.stopped:
            return Solved.untried(len(where))
        with _progress(len(where), self.refit.progress) as progress:
            parts = [
                self._current.solve(where[part], flat[part], progress)
                for part in self._groups(len(where))
            ]
            return Solved.joined(parts)

    @cached_property
    def _trial(self) -> dict[str, bool]:
        """The result of `_try_easiest`; empty before it."""
        return {}

    @property
    def _no_mode_found(self) -> bool:
        return self._trial.get("no_mode", False)

    @property
    def rare(self) -> float:
        """The probability below which a class is not refitted."""
        return RARE if self.refit.rare is None else self.refit.rare

    @property
    def stopped(self) -> bool:
        """Whether refits were stopped after the easiest ones made no progress, with nothing in
        their place.
        """
        return self._no_mode_found and not self.replaced

    def _try_easiest(self, where: Tensor, flat: Tensor, y: Tensor, rows: Tensor | None) -> None:
        """Before many refits of a network: the task that moves the weights least is tried; if it is
        stuck, the next ones of other inputs. All stuck: no refit has a mode near θ̂.
        """
        if (
            "no_mode" not in self._trial
            and len(where) > TRIALS
            and not self.posterior.network.linear
        ):
            steps = (self.output if rows is None else self.output.take(rows)).step(y).flatten()
            first, *rest = (
                torch.nan_to_num(steps, nan=math.inf)
                .argsort(stable=True)
                .split([1, len(where) - 1])
            )
            elsewhere = rest[0][where[rest[0]] != where[first]]
            trials = (first, (elsewhere if len(elsewhere) else rest[0])[: TRIALS - 1])
            self._trial["no_mode"] = all(
                bool(self._engine.stuck(where[part], flat[part]).all()) for part in trials
            )

    def modes(self, y: Tensor) -> Tensor:
        """θ̃(y): where each refit ends, of y's shape and P."""
        where, flat = self._tasks(y, None)
        found = torch.cat(
            [self._current.modes(where[part], flat[part]) for part in self._groups(len(where))]
        )
        return found.reshape(*self._shape(y), -1)

    def _tasks(self, y: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The row of x and the y of each task."""
        per_row = y.shape[1] if y.dim() > 1 + self._vector else 1
        index = torch.arange(len(y)) if rows is None else rows
        flat = y.reshape(-1, *y.shape[y.dim() - self._vector :])
        classes = self.likelihood.support_for(self.marginal.mean.shape[1]).kind == "class"
        return index.repeat_interleave(per_row), flat.long() if classes else flat

    def _groups(self, count: int) -> list[slice]:
        size = self._current.tasks_at_once
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    @property
    def _vector(self) -> int:
        return int(self.likelihood.support_for(self.marginal.mean.shape[1]).kind == "vector")

    def _shape(self, y: Tensor) -> torch.Size:
        return y.shape[:-1] if self._vector else y.shape

    def check(self, solved: Solved) -> Tensor:
        """Which tasks failed; RuntimeError if on_failure is "raise"."""
        failed = ~solved.converged
        if self.refit.on_failure == RAISE and bool(failed.any()):
            worst = float(torch.nan_to_num(solved.norm[failed], nan=math.inf).max())
            raise RuntimeError(
                f"{int(failed.sum())} of {failed.numel()} refits did not reach their mode in "
                f"{self.refit.max_steps} steps (the worst is {worst:.2g} posterior standard "
                f"deviations from it). {self._cause} Or use on_failure='fallback', which takes the "
                "output refit's answer there."
            )
        return failed

    @property
    def _cause(self) -> str:
        """Why refits fail, with the figure of the report, and the remedy."""
        report = self.posterior.report
        each = report.residual_after / math.sqrt(report.parameters)
        tried = (
            f"The {TRIALS} easiest made no progress, so the others were not tried. "
            if self.stopped
            else ""
        )
        if self.stopped and self.refit.linearised is None:
            tried += f"{self._why_not_linearised} "
        train = "train the network to convergence under this prior, " + (
            "mode='polish', " if report.mode != POLISH else ""
        )
        train = train if each > AT_MODE else ""
        return (
            f"{tried}The weights are {report.residual_after:.3g} posterior standard deviations "
            f"from the mode ({each:.2g} per parameter). Likely causes: (a) they are no maximum "
            "under this prior (not trained to the end, or a saddle); (b) y is far outside what "
            f"the model expects. Remedy: {train}a stronger prior, more max_steps or a larger "
            "tolerance in ssla.WeightRefit, or refit='output'."
        )

    def warn(self, failed: int, count: int, what: str) -> None:
        """Warn where the linearised network was refitted, and with the number of answers from
        the output rung.
        """
        if self.replaced:
            warn(
                f"The {TRIALS} easiest refits of the weights made no progress: the trained "
                "weights are no maximum under this prior. The network linearised at the trained "
                "weights was refitted in its place (`diagnostics.linearised` counts the inputs). "
                "ssla.WeightRefit(linearised=True) asks for this without a trial; "
                "linearised=False takes the output refit.",
                RuntimeWarning,
            )
        if failed and (self.refit.on_failure == FALLBACK or self.stopped):
            instead = "are NaN" if self.refit.on_failure == NAN else "use the output rung"
            message = (
                f"{failed:,} of {count:,} {what} did not converge and {instead}. {self._cause}"
            )
            warn(message, RuntimeWarning)

    def at(self, y: Tensor, rows: Tensor | None = None) -> Density:
        solved = self.solve(y, rows)
        failed, total = self.check(solved), solved.total
        if bool(failed.any()):
            instead = (
                self.output.at(y, rows).log.reshape(-1)
                if self.refit.on_failure == FALLBACK
                else torch.nan
            )
            total = torch.where(failed, instead, total)
        shape = self._shape(y)
        flags = (solved.fallback.reshape(shape), solved.converged.reshape(shape))
        return Density(
            total.reshape(shape),
            *flags,
            error=torch.where(failed, 0.0, solved.error).reshape(shape),
        )

    def __call__(self, y: Tensor) -> Increments:
        return self.increments(y)

    def increments(self, y: Tensor, rows: Tensor | None = None) -> Increments:
        """Of real refits, for some rows only: y (m, …) belongs to rows (m,)."""
        solved = self.solve(y, rows)
        failed = self.check(solved)
        self.warn(int(failed.sum()), failed.numel(), "refits of the weights")
        parts = [solved.likelihood, solved.prior, solved.curvature]
        if bool(failed.any()):
            if self.refit.on_failure == FALLBACK:
                below = (self.output if rows is None else self.output.take(rows))(y)
                instead = [p.reshape(-1) for p in (below.likelihood, below.prior, below.curvature)]
            else:
                instead = [torch.full_like(parts[0], torch.nan)] * 3
            parts = [torch.where(failed, b, a) for a, b in zip(parts, instead, strict=True)]
        likelihood, prior, curvature = (part.reshape(self._shape(y)) for part in parts)
        return Increments(likelihood, prior, curvature)
