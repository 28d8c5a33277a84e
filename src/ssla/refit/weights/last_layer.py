"""Refits of a last layer: thousands of tasks as a few matrix products over the features.

With f = φᵀΘ the outputs of n rows under m tasks are Φ Δ (n × mC), their scores come elementwise,
and the gradients of all tasks are one product with Φ again. Nothing is formed per task but its step
(P) and, for the determinant, its curvature (P×P):

    H(θ̃) − H(θ̂) = Σ_i φφᵀ ⊗ (Λ(y_i, f̃_i) − Λ(y_i, f̂_i)): vech(φφᵀ) is shared, so this too is one
    product.

Features are first brought to a basis in which the curvature's diagonal blocks average to the
identity. Pivots are then of the order of one, and log|H̃| − log|H| = Σ_j log(l̃_j²/l_j²) is a sum
of small terms, not a difference of large ones. What each trick brings: `last_layer_group`. The same
for one task and without tricks: `reference`.

Terms and symbols are those of `ssla.refit.weights` and of `last_layer_group`. The basis is L_B:
features are φ' = L_B⁻¹φ in it, and the step of each output is δ' = L_Bᵀδ, so φ'ᵀδ' = φᵀδ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssla.curvature.jacobians import Features
from ssla.curvature.structure import NoFactorError, make_factorisation_error_text
from ssla.data import as_inputs
from ssla.likelihoods import Likelihood
from ssla.priors import EXACT, PAPER
from ssla.refit.increments import FISHER, OBSERVED
from ssla.refit.weights.anderson import SHARED_STEPS, Ascent, Progress, ascend, finish_with_newton
from ssla.refit.weights.contrasts import Contrasts
from ssla.refit.weights.last_layer_group import (
    Group,
    InitialCurvature,
    change_basis,
    list_index_pairs,
    multiply_pairs,
)
from ssla.refit.weights.last_layer_structure import StructureDeterminants
from ssla.refit.weights.refit_rows import (
    Block,
    PriorChange,
    TrainingRows,
    as_matrix,
    check_same_data,
    open_rows,
)
from ssla.refit.weights.solved import STRUCTURE, Options, Solved, compute_row_curvature

if TYPE_CHECKING:
    from ssla.posterior import Posterior

# A guess, in posterior standard deviations: single precision finds a mode this well.
SINGLE_MODE = 1e-4
# The limits of single precision: `capped_exp` is exact up to e²², and squares of targets must not
# overflow.
SHARPEST_SINGLE, LARGEST_SINGLE = math.exp(22), 1e15
# A guess: rows × tasks × outputs worked on together. Larger arrays fall out of the cache.
CACHE_ELEMENTS = 1 << 19
# Guesses: vectors of all weights that a task of an ascent takes besides its history, and the
# fewest tasks that are worth a pass over the rows.
VECTORS_OF_ASCENT, FEWEST_TASKS = 12, 8


@dataclass(frozen=True, eq=False)
class LastLayerRefit:
    """All refits of one posterior's last layer at inputs x.

    An `Engine`: `solve` takes any tasks (row of x, y). Points are steps δ' (m, P) in the basis.
    """

    posterior: Posterior
    options: Options
    rows: TrainingRows  # features in the basis
    features: Tensor  # of x, in the basis (N, F)
    f: Tensor  # f̂ at x (N, C)
    basis: Tensor  # L_B (F, F): φ' = L_B⁻¹φ, δ' = L_Bᵀδ
    gradient: Tensor  # g₀ = ∇(ℓ_D + log π)(θ̂) (P,)
    # with the prior of the objective, for steps: the kind asked for first; the Fisher after it
    # where they differ
    initial_curvatures: tuple[InitialCurvature, ...]
    # the same with the prior of the determinants, which the conventions "paper" and "additive" omit
    determinant_curvatures: tuple[InitialCurvature, ...]
    # the observed curvature at θ̂ is not positive definite: all tasks use the Fisher
    fallback: bool

    # --- sizes -----------------------------------------------------------------------------

    @property
    def new_likelihood(self) -> Likelihood:
        """Return the likelihood of the new observation."""
        return self.posterior.likelihood.predictive

    @property
    def outputs(self) -> int:
        """Return the number of outputs C."""
        return self.f.shape[1]

    @property
    def tasks_at_once(self) -> int:
        """Return the number of tasks that are solved together, by the memory budget.

        If the rows are in memory, the processor's cache limits it too, but it is at least
        FEWEST_TASKS.
        """
        P = self.gradient.numel()
        # Half of the budget is for the ascent, which keeps three vectors for each mixed round.
        task_bytes = 8 * P * (3 * self.options.memory + VECTORS_OF_ASCENT)
        most = self.posterior.memory_budget // 2 // task_bytes
        if self.rows.kept is None:  # a pass is expensive: as many tasks as the memory holds
            return max(most, 1)
        largest = max(block.f.shape[0] for block in self.rows)
        return max(min(CACHE_ELEMENTS // (largest * self.outputs), most), FEWEST_TASKS)

    @cached_property
    def prior(self) -> PriorChange:
        """Return the change of log π with a step from θ̂, as an object: the prior increment."""
        return PriorChange(self.posterior.bound_prior, self.posterior.theta)

    @property
    def objective_prior(self) -> PriorChange:
        """Return the change of the log prior in the objective of the refits."""
        return self.initial_curvatures[0].prior

    def from_basis(self, point: Tensor) -> Tensor:
        """Return steps δ' (m, P) in the coordinates of θ (m, P): δ = L_B⁻ᵀδ' for each output."""
        by_output = point.reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis.mT, by_output.mT, upper=True)
        return solved.mT.reshape(point.shape)

    def to_basis(self, gradient: Tensor) -> Tensor:
        """Return gradients (m, P) in the coordinates δ' (m, P): L_B⁻¹g for each output."""
        by_output = gradient.reshape(-1, self.basis.shape[0])
        solved: Tensor = torch.linalg.solve_triangular(self.basis, by_output.mT, upper=False)
        return solved.mT.reshape(gradient.shape)

    def compute_prior_gradient_change(self, point: Tensor) -> Tensor:
        """Compute ∇log π(θ̂ + δ) − ∇log π(θ̂) in the basis (m, P), for points δ' (m, P).

        The result is in the dtype of the points.
        """
        if not self.objective_prior.is_gaussian:
            change = self.objective_prior.compute_gradient_change(self.from_basis(point.double()))
            return self.to_basis(change).to(point.dtype)
        by_output = point.reshape(len(point), self.outputs, -1).movedim(1, 0)
        change = -(by_output @ self._prior_precision_by_dtype[point.dtype])
        return change.movedim(0, 1).reshape(point.shape)

    @cached_property
    def _prior_precision_by_dtype(self) -> dict[torch.dtype, Tensor]:
        """Return the precision T of a Gaussian prior in the basis, L_B⁻¹TL_B⁻ᵀ (C, F, F), by dtype.

        The dtypes are those of single and double precision.
        """
        prior = self.objective_prior
        diagonal = torch.diag_embed(prior.bound.precision(prior.theta).reshape(self.outputs, -1))
        # L⁻¹(L⁻¹T)ᵀ = L⁻¹TL⁻ᵀ, as T is symmetric.
        half = torch.linalg.solve_triangular(self.basis, diagonal, upper=False)
        precision = torch.linalg.solve_triangular(self.basis, half.mT, upper=False)
        return {torch.float64: precision, torch.float32: precision.float()}

    @cached_property
    def _stored_values(self) -> dict[tuple[int, str], Tensor]:
        """Return the dictionary in which `store_for_block` keeps values, by block and name.

        A block is known by its id: a kept block lives as long as this refit, so no other block has
        it.
        """
        return {}

    def store_for_block(self, block: Block, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return the value of `compute` for a block, and store it for the next call.

        name: what the value is; the same name must always belong to the same computation. A value
        is stored if the rows are kept in memory and all stored values together fit a quarter of the
        memory budget. Otherwise it is computed at every call.
        """
        value = self._stored_values.get((id(block), name))
        if value is None:
            value = compute()
            all_values = (*self._stored_values.values(), value)
            used_bytes = sum(stored.numel() * stored.element_size() for stored in all_values)
            if self.rows.kept is not None and used_bytes <= self.posterior.memory_budget // 4:
                self._stored_values[id(block), name] = value
        return value

    def cast_block(self, block: Block, dtype: torch.dtype) -> Block:
        """Return a block (b rows) with its numbers in `dtype`, float32 or float64.

        Targets that are whole numbers stay as they are. Results in float32 are stored for the next
        call (see `store_for_block`).
        """
        if dtype == torch.float64:
            return block

        def cast(name: str, value: Tensor) -> Tensor:
            """Return a value of the block in `dtype`, or as it is where it holds whole numbers."""
            if not value.is_floating_point():
                return value
            return self.store_for_block(block, f"{name} {dtype}", lambda: value.to(dtype))

        weights = None if block.weights is None else cast("weights", block.weights)
        return Block(cast("x", block.x), cast("f", block.f), cast("y", block.y), weights)

    @cached_property
    def fits_single_precision(self) -> bool:
        """Return whether float32 holds the likelihood's derivatives on all training rows.

        It does not if the unit of y is very small or very large.
        """
        likelihood = self.posterior.likelihood
        for block in self.rows:
            sharpest = float(likelihood.fisher(block.f).amax())
            largest = float(torch.maximum(block.f.abs().amax(), block.y.abs().amax()))
            if sharpest > SHARPEST_SINGLE or largest > LARGEST_SINGLE:
                return False
        return True

    def multiply_features(self, block: Block, dtype: torch.dtype) -> Tensor:
        """Return vech(φφᵀ) of the rows of a block (b, F(F + 1)/2), in `dtype`, and store it."""
        return self.store_for_block(
            block, f"squares {dtype}", lambda: multiply_pairs(block.x).to(dtype)
        )

    def list_paired_covariances(self, block: Block, initial: InitialCurvature) -> Tensor:
        """Return the entries a ≤ b of K = J H⁻¹ Jᵀ at the rows of a block (pairs, b).

        H is that of `initial`. An entry off the diagonal stands for two of K and is doubled: the
        sum of its products with the entries of ΔΛ is then tr KΔΛ. The result is stored for the next
        call.
        """

        def compute_entries() -> Tensor:
            """Return the entries (pairs, b), which `store_for_block` keeps."""
            K = initial.operator.covariance(Features(block.x, initial.outputs))
            entries = []
            for a, b in list_index_pairs(initial.outputs):
                entries.append(K[:, a, b] if a == b else 2 * K[:, a, b])
            return torch.stack(entries)

        return self.store_for_block(block, f"K {id(initial)}", compute_entries)

    @cached_property
    def _structure_determinants(self) -> StructureDeterminants:
        """Return the determinants by the fitted structure, with their value at θ̂."""
        return StructureDeterminants(self)

    @cached_property
    def contrast_curvature(self) -> InitialCurvature | None:
        """Return H(θ̂) in contrasts of classes, which are C − 1 outputs in place of C.

        See `ssla.refit.weights.contrasts`. None if the ratio of determinants would not be the same:
        for other likelihoods, for the Fisher information in place of the observed curvature, for
        priors that differ by class, and for determinants without the prior.
        """
        prior, likelihood = self.prior, self.posterior.likelihood
        initial = self.initial_curvatures[0]
        temperature = likelihood.logit_temperature
        if temperature is None or not likelihood.softmax or likelihood.power != 1:
            return None
        if not prior.is_gaussian or initial.curvature_kind != OBSERVED:
            return None
        if self.posterior.convention != EXACT:
            return None
        precision = prior.bound.precision(prior.theta).reshape(self.outputs, -1)
        if not torch.equal(precision, precision[:1].expand_as(precision)):
            return None
        contrasts = Contrasts(self.outputs, temperature)
        return InitialCurvature(
            initial.curvature_kind,
            torch.linalg.cholesky(contrasts.project_blocks(initial.matrix)),
            self.outputs - 1,
            initial.prior,
            contrasts,
        )

    # --- one group of tasks ----------------------------------------------------------------

    def find_modes(self, x_rows: Tensor, y: Tensor, progress: Progress | None = None) -> Ascent:
        """Find the mode of each task, for x_rows (m,) and y (m, …): see `Engine`."""
        return self._find_modes(Group(self, self.initial_curvatures[0], x_rows, y), progress)

    def solve(
        self,
        x_rows: Tensor,
        y: Tensor,
        progress: Progress | None = None,
        at: Ascent | None = None,
    ) -> Solved:
        """Compute the three increments of m tasks, each at its own mode: see `Engine`.

        x_rows (m,): the row of x of each task. y (m, …). Tasks whose observed curvature is
        indefinite at the mode use the Fisher information, and are marked. Tasks that fail are
        marked as not converged.
        """
        group = Group(self, self.initial_curvatures[0], x_rows, y)
        ascent = self._find_modes(group, progress) if at is None else at
        likelihood, prior = group.compute_likelihood_and_prior(ascent.point)
        curvature, positive, fallback = self._compute_curvature_increments(group, ascent.point)
        finite = torch.isfinite(likelihood + prior + curvature)
        return Solved(
            likelihood,
            prior,
            curvature,
            fallback,
            converged=ascent.converged & positive & finite,
            steps=ascent.steps,
            norm=ascent.norm,
            error=torch.zeros_like(curvature),
        )

    def _compute_curvature_increments(
        self, group: Group, point: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the curvature increments of a group at points (m, P), as the options set.

        Returns the increments, where they exist, and where the Fisher information took the place of
        an indefinite observed curvature: all (m,).
        """
        if self.options.logdet == STRUCTURE:
            # The structure has the Fisher information in any case.
            never = torch.zeros(len(point), dtype=torch.bool)
            return self._structure_determinants(group, point), ~never, never
        start = self.determinant_curvatures[0]
        curvature, positive = group.compute_curvature_increments(
            point, self.contrast_curvature or start
        )
        fallback = torch.full_like(positive, self.fallback)
        indefinite = (~positive).nonzero().squeeze(-1)
        fallback[indefinite] = True
        if indefinite.numel() and start.curvature_kind == OBSERVED:
            fisher_group = group.select_tasks(indefinite)
            curvature[indefinite], positive[indefinite] = fisher_group.compute_curvature_increments(
                point[indefinite], self.determinant_curvatures[-1]
            )

        return curvature, positive, fallback

    def find_stuck(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Return False for each task (m,): f is linear in θ, so that refits are quick."""
        return torch.zeros(len(x_rows), dtype=torch.bool)

    def find_weights_at_modes(self, x_rows: Tensor, y: Tensor) -> Tensor:
        """Find the mode of each task, and return its weights θ̃ (m, P): see `Engine`."""
        ascent = self._find_modes(Group(self, self.initial_curvatures[0], x_rows, y))
        return self.posterior.theta + self.from_basis(ascent.point)

    def _find_modes(self, group: Group, progress: Progress | None = None) -> Ascent:
        """Find the modes of a group's tasks, in three stages.

        First with the curvature at θ̂, which all tasks share, in float32, if the rows are in
        memory; then the same in float64; then with the task's own Hessian, for tasks that have not
        converged. Classes (targets without rounding error) may end after the first stage.
        """
        tolerance = self.options.tolerance
        steps_left = self.options.max_steps
        start = group.compute_start_point()
        ascent = Ascent.not_started(start)
        tasks = torch.arange(len(start))

        if self.rows.kept is not None and self.fits_single_precision:
            may_end = tolerance >= SINGLE_MODE and not group.y.is_floating_point()
            single_steps = min(SHARED_STEPS, steps_left // 2)
            # Tasks that go on in float64 are counted there.
            ascent = self._ascend_in_single(
                group, start, single_steps, progress if may_end else None
            )
            steps_left -= single_steps
            if may_end:
                tasks = (~ascent.converged).nonzero().squeeze(-1)

        if tasks.numel():
            double_steps = min(SHARED_STEPS, steps_left)
            in_double = ascend(
                group.select_tasks(tasks).evaluate,
                ascent.point[tasks],
                tolerance=tolerance,
                max_steps=double_steps,
                memory=self.options.memory,
                progress=progress,
            )
            ascent = ascent.continued_by(tasks, in_double)
            steps_left -= double_steps

        return finish_with_newton(
            ascent,
            lambda unfinished: group.select_tasks(unfinished).evaluate_newton,
            tolerance=tolerance,
            max_steps=steps_left,
            progress=progress,
        )

    def _ascend_in_single(
        self, group: Group, start: Tensor, max_steps: int, progress: Progress | None
    ) -> Ascent:
        """Ascend from `start` (m, P) in float32, to SINGLE_MODE at best; the result is in float64.

        max_steps: the most gradients of a task. A coordinate that is not finite at the end is that
        of the start again.
        """
        in_single = ascend(
            group.evaluate,
            start.float(),
            tolerance=max(self.options.tolerance, SINGLE_MODE),
            max_steps=max_steps,
            memory=self.options.memory,
            progress=progress,
        )
        point = torch.where(torch.isfinite(in_single.point), in_single.point.double(), start)
        return replace(in_single, point=point, norm=in_single.norm.double())


def open_last_layer(posterior: Posterior, x: Any, options: Options, data: Any) -> LastLayerRefit:
    """Prepare all refits of a last layer at inputs x: everything that does not depend on y.

    A pass over the data sums gradient and curvature at θ̂. x: N inputs. data: the training data;
    None: those of the posterior. Raises ValueError if the data are not those of the fit or cannot
    be read again, and NoFactorError if no curvature at θ̂ is positive definite.
    """
    network = posterior.network

    def prepare_inputs(inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the features (b, F) and f̂ (b, C) of cast inputs, in float64."""
        f, J = network.linearise(inputs, posterior.theta)
        assert isinstance(J, Features)
        return J.double().phi, f.double()

    rows = open_rows(posterior, data, prepare_inputs)
    kinds = (OBSERVED, FISHER) if options.curvature == OBSERVED else (FISHER,)
    n, gradient, sums = sum_gradient_and_curvature(posterior, rows, kinds)
    check_same_data(posterior, n, gradient)

    basis, initial_curvatures, determinant_curvatures = _factorise_start(posterior, sums)
    chunks = network.chunks(as_inputs(x), posterior.memory_budget)
    inputs_in_chunks = [prepare_inputs(network.cast(chunk)) for chunk in chunks]
    return LastLayerRefit(
        posterior=posterior,
        options=options,
        rows=rows.map_chunks(lambda block: block._replace(x=whiten(block.x, basis))),
        features=whiten(torch.cat([phi for phi, _ in inputs_in_chunks]), basis),
        f=torch.cat([f for _, f in inputs_in_chunks]),
        basis=basis,
        gradient=gradient + posterior.objective_prior.gradient(posterior.theta),
        initial_curvatures=initial_curvatures,
        determinant_curvatures=determinant_curvatures,
        fallback=determinant_curvatures[0].curvature_kind != options.curvature,
    )


def sum_gradient_and_curvature(
    posterior: Posterior, rows: TrainingRows, kinds: tuple[str, ...]
) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Sum the gradient and the curvature of the training rows at θ̂, in float64.

    kinds: OBSERVED, FISHER or both. The blocks of `rows` have features x (b, F) that are not
    whitened. Returns the number of rows, ∇ℓ_D (P,), and by kind the data's curvature (P, P), which
    is without the prior.
    """
    C, likelihood = posterior.network.outputs, posterior.likelihood
    P = posterior.theta.numel()
    n = 0
    gradient = torch.zeros(P, dtype=torch.float64)
    sums = {curvature_kind: torch.zeros(P, P, dtype=torch.float64) for curvature_kind in kinds}
    for block in rows:
        features = Features(block.x, C)
        n += block.y.shape[0]
        gradient += features.pull(block.apply_weights(likelihood.score(block.y, block.f)))
        for curvature_kind, total in sums.items():
            precision = compute_row_curvature(likelihood, curvature_kind, block.y, block.f)
            total += features.gram(block.apply_weights(precision))
    return n, gradient, sums


def whiten(phi: Tensor, basis: Tensor) -> Tensor:
    """Return φ' = L_B⁻¹φ for the rows of phi (b, F), as (b, F)."""
    white: Tensor = torch.linalg.solve_triangular(basis, phi.mT, upper=False)
    return white.mT.contiguous()


def _factorise_start(
    posterior: Posterior, sums: Mapping[str, Tensor]
) -> tuple[Tensor, tuple[InitialCurvature, ...], tuple[InitialCurvature, ...]]:
    """Choose the basis L_B (F, F), and factorise H(θ̂) in it: for steps, and for determinants.

    sums: the data's curvature (P, P) by kind, FISHER among them. Only kinds for which H is positive
    definite are returned. Raises NoFactorError if there is none.
    """
    C = posterior.network.outputs
    objective_prior = PriorChange(posterior.objective_prior, posterior.theta)
    prior_precision = as_matrix(objective_prior.bound.precision(posterior.theta))
    curvatures = {curvature_kind: total + prior_precision for curvature_kind, total in sums.items()}

    # The basis makes the average of the diagonal blocks the identity.
    blocks = curvatures[FISHER].reshape(C, -1, C, posterior.theta.numel() // C)
    basis, info = torch.linalg.cholesky_ex(blocks.diagonal(dim1=0, dim2=2).mean(-1))
    usable = _factorise_all(curvatures, None if int(info) else basis, C, objective_prior)
    if not usable:
        raise NoFactorError(
            make_factorisation_error_text(prior_precision, " on the data to refit on")
        )
    if posterior.convention == PAPER:  # the prior is in the steps, and not in the determinants
        return basis, usable, _factorise_without_prior(posterior, sums, basis)

    return basis, usable, usable


def _factorise_without_prior(
    posterior: Posterior, sums: Mapping[str, Tensor], basis: Tensor
) -> tuple[InitialCurvature, ...]:
    """Factorise the data's curvature alone, for the determinants of the paper's convention.

    sums: that curvature (P, P) by kind. basis: L_B (F, F). Raises NoFactorError if none is positive
    definite.
    """
    prior = PriorChange(posterior.determinant_prior, posterior.theta)
    curvatures = _factorise_all(sums, basis, posterior.network.outputs, prior)
    if not curvatures:
        raise NoFactorError(
            "convention='paper' leaves the prior out of the curvature, and the data to refit "
            "on alone do not determine every parameter. Use convention='exact'."
        )
    return curvatures


def _factorise_all(
    curvatures: Mapping[str, Tensor], basis: Tensor | None, outputs: int, prior: PriorChange
) -> tuple[InitialCurvature, ...]:
    """Factorise H = L Lᵀ of each kind in the basis, and return those that are positive definite.

    curvatures: H (P, P) by kind, which includes the curvature of `prior`. basis: L_B (F, F); None
    if there is none, and then nothing is returned. outputs: C.
    """
    usable = []
    for curvature_kind, H in curvatures.items():
        if basis is None:
            continue
        factor, info = torch.linalg.cholesky_ex(change_basis(H, basis))
        if not int(info):
            usable.append(InitialCurvature(curvature_kind, factor, outputs, prior))
    return tuple(usable)
