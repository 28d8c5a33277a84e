"""SSLA: a real refit of the weights on all of the data plus (x, y), for every candidate y.

Terms and symbols are those of `ssla.refit.weights`. An engine prepares what does not depend on y,
and then solves any tasks (`ssla.refit.weights.solved.Engine`):

dense          a last layer whose P×P matrices for each task fit the memory budget
products       a larger last layer, by products with its features
all weights    any other weights
linearised     the network linearised at θ̂, where the network itself has no mode near θ̂

An obstacle is a text for a user: why something is not possible, and what to do instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ssla._checks import check_name
from ssla.data import Inputs, as_inputs, row_count
from ssla.priors import EXACT as EXACT_CONVENTION
from ssla.priors import BoundGaussian
from ssla.refit.increments import FISHER, OBSERVED
from ssla.refit.outputs import OutputRefit
from ssla.refit.weights.all_weights import open_all_weights
from ssla.refit.weights.all_weights_dual import MOST_OUTPUTS, allows_dual, count_dual_task_bytes
from ssla.refit.weights.at_prediction import CANDIDATE, POINTS
from ssla.refit.weights.determinants import SMALL
from ssla.refit.weights.last_layer import open_last_layer
from ssla.refit.weights.last_layer_blocks import count_vectors_that_fit
from ssla.refit.weights.last_layer_curvature import count_factor_bytes
from ssla.refit.weights.last_layer_products import SINGLE_TOLERANCE, is_large_problem, open_products
from ssla.refit.weights.linearised import (
    choose_logdet,
    find_obstacle_to_linearising,
    open_linearised,
)
from ssla.refit.weights.solved import (
    EXACT,
    FAILURES,
    FALLBACK,
    FROZEN,
    HESSIAN,
    LOGDETS,
    STRUCTURE,
    TRACES,
    Engine,
    Options,
)
from ssla.refit.weights.weight_log_density import WeightLogDensity

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# The defaults of `WeightRefit.tolerance` for classes, whose log probabilities are then off by about
# as much, and for other targets.
CLASS_TOLERANCE, TOLERANCE = 1e-4, 1e-8
# A guess: the tolerance for classes of a large last layer, whose determinants have a larger error.
LARGE_TOLERANCE = 5e-4
# A guess: P×P matrices that refits of a last layer hold at the peak.
DENSE_COPIES = 6
# Guesses: rounds that the ascents of the dense engine, of products and of all weights mix.
DENSE_ROUNDS, PRODUCT_ROUNDS, ALL_WEIGHTS_ROUNDS = 4, 6, 12
FEWEST_CANDIDATES = 4  # of a not-a-knot cubic spline
CURVATURES = (OBSERVED, FISHER, HESSIAN)
NO_STRUCTURE = (
    "Refits of the linearised network have no logdet='structure'. Use 'exact', 'traces' or "
    "'frozen'."
)


@dataclass(frozen=True, eq=False)
class WeightRefit:
    """Refits of the weights: θ̃(y) = argmax ℓ_D(θ) + log p(y|x,θ) + log π(θ) − g₀ᵀ(θ − θ̂).

    The log density of y is the sum of the three increments at θ̃ (docs/design.md). All (x, y) are
    solved together, deterministically. g₀, the gradient at θ̂, makes θ̂ the mode without (x, y);
    after mode="polish" it is zero to rounding, with mode="as_is" it is left out.

    Fails where θ̂ is not a maximum, as in large networks trained on few rows or not to their end:
    there is no mode near it to find (docs/refits.md). At an input where a refit of the network
    fails, the network linearised at θ̂ is refitted in its place, with a warning, where that is
    possible (see `linearised`). Of many refits a few are tried first: if they make no progress, all
    inputs are linearised at once. Other refits that fail fall back as `on_failure` sets, with a
    warning that counts them.

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
        at a y far out; default otherwise), or "structure" (the fitted structure at θ̃ with the
        Fisher information, so that kfac and diag differ from "exact"; sums over all rows for each
        task).
    linearised:
        True refits the network linearised at θ̂, f_i = f̂_i + J_i(θ − θ̂) on all rows. For Gaussian
        priors and concave likelihoods each such refit has a mode. Its determinants are exact for at
        most 2,000 training rows × outputs, and have a stated error beyond (logdet="traces"). False
        never does so. Default: at inputs where the network itself has no mode near θ̂, if the memory
        budget allows it and on_failure is "fallback". A last layer is linear: the option changes
        nothing there.
    on_failure:
        For a task that does not reach its mode: "fallback" (take the output refit's answer, and
        count it in `diagnostics`), "nan", or "raise".
    data:
        The training data, where the posterior does not hold them (fitted from a generator, loaded
        from a file).
    at:
        Which y is added in the refit: "candidate" (default), the y whose density is asked for; or
        "prediction", the paper's Algorithm 1 as it is written: one refit for each x with the point
        prediction ŷ (the mean of y at θ̂, the most probable class, the nearest count), at whose θ̃
        every y is then evaluated. The second costs one refit for each x, and is not the Laplace
        approximation of p(y|x, D): it equals ASSLA for constant Gaussian noise, and is too narrow
        with a log variance among the outputs (docs/refits.md).
    candidates, half_width:
        For one continuous target: `predict` evaluates k = `candidates` values of y, equally spaced
        on ŷ ± half_width (in units of y), interpolates their log densities by a spline, and
        normalises on that range, as the paper does. Mass beyond it is cut: a warning says where
        that is more than 2%, and `diagnostics.cut` how much. At least four candidates. Default:
        the whole line, by refits where they are needed (see `interpolation`).
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
    at: str | None = None
    candidates: int | None = None
    half_width: float | None = None

    name = "weights"

    def __post_init__(self) -> None:
        """Raise ValueError for an option that is out of its range or unknown."""
        if self.rare is not None and (isinstance(self.rare, bool | str) or not 0 <= self.rare < 1):
            raise ValueError(
                f"rare must be a number from 0 and below 1, for example 1e-4, but is {self.rare!r}."
            )

        for name, value in (("tolerance", self.tolerance), ("interpolation", self.interpolation)):
            if value is not None and (isinstance(value, bool | str) or not 0 < value < 1):
                raise ValueError(
                    f"{name} must be a number between 0 and 1, for example 1e-8, but is {value!r}."
                )

        is_whole = isinstance(self.max_steps, int) and not isinstance(self.max_steps, bool)
        if not is_whole or self.max_steps < 1:
            raise ValueError(f"max_steps must be a whole number from 1, but is {self.max_steps!r}.")
        if self.curvature is not None:
            check_name("curvature", self.curvature, CURVATURES)
        if self.logdet is not None:
            check_name("logdet", self.logdet, LOGDETS)
        check_name("on_failure", self.on_failure, FAILURES)
        check_name("at", self.refitted_point, POINTS)
        self._check_candidates()
        if not (self.linearised is None or isinstance(self.linearised, bool)):
            raise ValueError(
                f"linearised must be True, False or None (automatic), but is {self.linearised!r}."
            )

    def _check_candidates(self) -> None:
        """Raise ValueError unless candidates and half_width are both None, or both in range."""
        count, width = self.candidates, self.half_width
        if count is None and width is None:
            return
        if count is None or width is None:
            raise ValueError(
                "candidates and half_width belong together: k values of y, equally spaced on "
                f"ŷ ± half_width. Got candidates={count!r} and half_width={width!r}; give both, "
                "for example candidates=20, half_width=1.96, or neither."
            )
        if not isinstance(count, int) or isinstance(count, bool) or count < FEWEST_CANDIDATES:
            raise ValueError(
                f"candidates must be a whole number from {FEWEST_CANDIDATES} (a cubic spline needs "
                f"as many), but is {count!r}."
            )
        if isinstance(width, bool | str) or not 0 < width < math.inf:
            raise ValueError(
                "half_width must be a finite number above zero, in units of y, for example 1.96, "
                f"but is {width!r}."
            )

    @property
    def refitted_point(self) -> str:
        """Return which y is added in the refits, CANDIDATE or PREDICTION: `at` with its default."""
        return CANDIDATE if self.at is None else self.at

    def __call__(self, posterior: Posterior, x: Inputs) -> WeightLogDensity:
        """Return the log density of y at the inputs x (N rows), by refits.

        No refit is made yet. Raises ValueError for a convention that the options do not allow.
        """
        obstacle = self._find_obstacle_to_convention(posterior)
        if obstacle is not None:
            raise ValueError(
                f"{obstacle} This posterior has convention={posterior.convention!r}, which leaves "
                "the prior out of the curvature. Or use refit='output', 'newton' or 'none', or "
                "posterior.with_prior(posterior.prior), the exact convention."
            )
        output = OutputRefit()(posterior, x)
        return WeightLogDensity(self, posterior, x, output)

    def _find_obstacle_to_convention(self, posterior: Posterior) -> str | None:
        """Return why these options do not allow the posterior's convention, with a remedy.

        None if they allow it. The conventions "paper" and "additive" have the dense engine of a
        last layer and that of all weights with exact determinants, or determinants of the
        structure. The other engines divide by the prior's precision, or take one curvature for
        steps and determinants.
        """
        if posterior.convention == EXACT_CONVENTION:
            return None
        if posterior.network.linear:
            if self._uses_products(posterior):
                return (
                    "logdet='traces', which is for last layers whose P×P matrices do not fit the "
                    "memory budget, works with the exact convention only. Use logdet='exact' and "
                    "a larger memory_budget."
                )
            return None
        if self.linearised:
            return (
                "Refits of the linearised network work with the exact convention only. Leave "
                "linearised=True out."
            )
        if self.logdet == FROZEN:
            return (
                "logdet='frozen' of all weights works with the exact convention only. Use "
                f"logdet='structure', or 'exact' for at most {SMALL} weights."
            )
        if self.logdet != STRUCTURE and posterior.theta.numel() > SMALL:
            return (
                f"More than {SMALL} weights have their determinants with the exact convention "
                "only. Use logdet='structure', or weights='last_layer' in the fit."
            )

        return None

    def open_engine(self, posterior: Posterior, x: Inputs) -> Engine:
        """Open the engine that refits the posterior's own weights, for the inputs x.

        It is one of the first three of the module's docstring. Opening takes a pass over the
        training rows. Raises ValueError if the options, the prior or the memory budget do not allow
        the refits, or if the training data cannot be read again.
        """
        if posterior.network.linear:
            options = self._resolve_options_of_last_layer(posterior)
            if self._uses_products(posterior):
                single = self._uses_single_precision(posterior)
                return open_products(posterior, x, options, self.data, single)
            return open_last_layer(posterior, x, options, self.data)
        return open_all_weights(
            posterior, x, self._resolve_options_of_all_weights(posterior), self.data
        )

    def open_linearised_engine(self, posterior: Posterior, x: Inputs) -> Engine:
        """Open the engine that refits the network linearised at θ̂, for the inputs x.

        Raises ValueError if such refits are not possible, as for logdet="structure".
        """
        if self.logdet == STRUCTURE:
            raise ValueError(NO_STRUCTURE)
        # The Hessian of outputs that are linear in the weights is the observed curvature.
        curvature = FISHER if self.curvature == FISHER else OBSERVED
        logdet = self.logdet or choose_logdet(posterior)
        options = Options(
            self._resolve_tolerance(posterior), self.max_steps, curvature, logdet, PRODUCT_ROUNDS
        )
        return open_linearised(
            posterior, x, options, self.data, self._uses_single_precision(posterior)
        )

    def find_obstacle_to_linearising(self, posterior: Posterior, x: Inputs) -> str | None:
        """Return why refits of the linearised network cannot replace refits of the network.

        The text names the option or the reason, with a remedy. None if they can replace them, for
        the inputs x.
        """
        if self.linearised is False:
            return "linearised=False rules out refits of the linearised network."
        # With "nan" and "raise" the user wants to know that the network itself has no mode.
        if self.on_failure != FALLBACK:
            return (
                "ssla.WeightRefit(linearised=True) refits the network linearised at these weights."
            )
        if self.logdet == STRUCTURE:
            return NO_STRUCTURE
        if posterior.convention != EXACT_CONVENTION:
            return "Refits of the linearised network work with the exact convention only."

        return find_obstacle_to_linearising(
            posterior, row_count(as_inputs(x)), self._uses_single_precision(posterior)
        )

    def _resolve_tolerance(self, posterior: Posterior) -> float:
        """Return the tolerance of the ascent: the option, or its default for the posterior.

        The default depends on whether y is a class.
        """
        if self.tolerance is not None:
            return self.tolerance
        return CLASS_TOLERANCE if self._is_for_classes(posterior) else TOLERANCE

    def _is_for_classes(self, posterior: Posterior) -> bool:
        """Return whether y is a class."""
        return posterior.likelihood.support_for(posterior.network.outputs).kind == "class"

    def _resolve_options_of_last_layer(self, posterior: Posterior) -> Options:
        """Return the user's options for a last layer, with defaults in place of None.

        The defaults depend on the posterior's size and likelihood. Raises ValueError if the prior
        or the memory budget does not allow refits with these options.
        """
        # f is linear, so the Hessian is the observed curvature.
        curvature = FISHER if self.curvature == FISHER else OBSERVED
        tolerance = self._resolve_tolerance(posterior)
        if not self._uses_products(posterior):
            _check_budget(
                f"A refit of a last layer with {posterior.theta.numel():,} parameters",
                count_dense_bytes(posterior),
                posterior,
                "logdet='traces', refit='output'",
            )
            return Options(tolerance, self.max_steps, curvature, self.logdet or EXACT, DENSE_ROUNDS)
        self._check_gaussian_prior(posterior)
        if self.logdet is None:
            self._check_shared_curvature(posterior)

        # A mode nearer than this gains nothing beside the error of the determinants.
        if (
            self.tolerance is None
            and self._uses_single_precision(posterior)
            and is_large_problem(posterior)
        ):
            tolerance = LARGE_TOLERANCE

        return Options(tolerance, self.max_steps, curvature, self.logdet or TRACES, PRODUCT_ROUNDS)

    def _check_shared_curvature(self, posterior: Posterior) -> None:
        """Raise ValueError if neither one P×P matrix for all tasks nor blocks of it fit the budget.

        Determinants would then come from the fitted structure, and may be off by 0.1: a user has to
        ask for that.
        """
        outputs, budget = posterior.network.outputs, posterior.memory_budget
        width = posterior.theta.numel() // outputs
        dtype = torch.float32 if self._uses_single_precision(posterior) else torch.float64
        if count_vectors_that_fit(posterior.statistics.n, outputs, width, dtype.itemsize, budget):
            return
        _check_budget(
            f"A refit of a last layer with {posterior.theta.numel():,} parameters",
            count_factor_bytes(outputs, width, dtype),
            posterior,
            "refit='output', or logdet='traces' (determinants of the fitted structure, which may "
            "be off by 0.1)",
        )

    def _uses_products(self, posterior: Posterior) -> bool:
        """Return whether a last layer is refitted by products, without a P×P matrix for each task.

        True if logdet="traces" asks for that, or if no such matrices fit the memory budget. Priors
        that are not Gaussian have the dense engine only.
        """
        if self.logdet in (EXACT, TRACES, STRUCTURE):
            return self.logdet == TRACES
        gaussian = isinstance(posterior.bound_prior, BoundGaussian)
        return gaussian and count_dense_bytes(posterior) > posterior.memory_budget

    def _check_gaussian_prior(self, posterior: Posterior) -> None:
        """Raise ValueError unless the prior is Gaussian, which products with features need."""
        if not isinstance(posterior.bound_prior, BoundGaussian):
            raise ValueError(
                "logdet='traces' needs a Gaussian prior, whose curvature is the same everywhere, "
                f"but this posterior has {posterior.report.prior}. Use logdet='exact', "
                "ssla.priors.Gaussian, or refit='output'."
            )

    def _uses_single_precision(self, posterior: Posterior) -> bool:
        """Return whether engines by products, and of linearised networks, compute in float32.

        True for classes, whose targets have no rounding error, at a tolerance that float32 meets.
        """
        return self._resolve_tolerance(posterior) >= SINGLE_TOLERANCE and self._is_for_classes(
            posterior
        )

    def _resolve_options_of_all_weights(self, posterior: Posterior) -> Options:
        """Return the user's options for the engine of all weights, with defaults in place of None.

        The defaults depend on the number of weights and on the likelihood. Raises ValueError for
        logdet="traces"; and, with more than SMALL weights, for curvature="hessian" unless
        logdet="structure", and for logdet="exact" where `_check_exact_determinants` does.
        """
        size = posterior.theta.numel()
        if self.logdet == TRACES:
            raise ValueError(
                "logdet='traces' is for a last layer. For weights='all' use 'exact', 'frozen' or "
                "'structure'."
            )
        logdet = self.logdet or (EXACT if size <= SMALL else FROZEN)
        curvature = self.curvature or OBSERVED
        if size > SMALL:
            if curvature == HESSIAN and logdet != STRUCTURE:
                raise ValueError(
                    f"curvature='hessian' forms a P×P matrix for each refit and is for at most "
                    f"{SMALL} weights, but this posterior has {size:,}. Use curvature='observed' "
                    "or 'fisher'."
                )
            if logdet == EXACT:
                _check_exact_determinants(posterior)

        return Options(
            self._resolve_tolerance(posterior),
            self.max_steps,
            curvature,
            logdet,
            ALL_WEIGHTS_ROUNDS,
        )


def _check_exact_determinants(posterior: Posterior) -> None:
    """Raise ValueError unless more than SMALL weights can have logdet="exact".

    They can where `ssla.refit.weights.all_weights_dual` is possible and fits the memory budget.
    """
    size = posterior.theta.numel()
    if not allows_dual(posterior):
        raise ValueError(
            f"logdet='exact' is for at most {SMALL} weights, or for at most {MOST_OUTPUTS:,} "
            "rows times outputs under a proper Gaussian prior, but this posterior has "
            f"{size:,} weights, {posterior.statistics.n:,} rows and "
            f"{posterior.network.outputs} outputs. Use logdet='frozen' (an error of O(1/n)) or "
            "logdet='structure'."
        )
    _check_budget(
        f"logdet='exact' for {size:,} weights",
        count_dual_task_bytes(posterior),
        posterior,
        "logdet='frozen'",
    )


def count_dense_bytes(posterior: Posterior) -> int:
    """Return the bytes that refits of a last layer with P×P matrices in float64 need."""
    return 8 * DENSE_COPIES * posterior.theta.numel() ** 2


def _check_budget(task: str, needed: int, posterior: Posterior, instead: str) -> None:
    """Raise ValueError if the bytes `needed` exceed the memory budget of the posterior.

    task and instead are parts of its text: what needs the bytes, and what the user may do.
    """
    if needed > posterior.memory_budget:
        raise ValueError(
            f"{task} needs {needed / 2**30:.2g} GiB for its curvature, more than the memory budget "
            f"of {posterior.memory_budget / 2**30:.2g} GiB. Use {instead}, or fit with a larger "
            "memory_budget."
        )
