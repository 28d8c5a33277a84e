"""Kronecker-factored curvature, layer by layer; the diagonal for layers without a Kronecker form.

For a layer applied at T positions of each row, with inputs a and backpropagated output gradients δ
(C of them):

    expand:  H ≈ (Σ_it a aᵀ) ⊗ (Σ_it δᵀΛδ) / Σ_it 1             each position counts as a row
    reduce:  H ≈ (Σ_i ā āᵀ) ⊗ (Σ_i (Σ_t δ_t)ᵀΛ(Σ_t δ_t)) / n     with ā the mean over positions

Λ is the likelihood's own Fisher information, propagated exactly: C backward passes, no Monte Carlo.
Both are exact for one row and one position, and for a linear model if Λ does not depend on the row.
Eigenbases of the factors are kept, so another prior precision needs no pass over data and no new
factorisation. A prior precision that varies inside a layer is not a Kronecker product and is
refused.

With output_factor="diagonal" only the diagonal of the second factor is summed: C numbers in place
of C×C, and no eigenvectors. A fit takes it by default for a last layer of very many classes.

The input factor A is the first of the two, the output factor G the second. The eigenbasis of a
layer is Q_G ⊗ Q_A, with the eigenvectors of both. Other terms are those of `ssla.curvature`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from ssla._checks import check_name
from ssla.curvature.jacobians import Features, Jacobian, LayerBlock, LayerJacobian, RestBlock
from ssla.curvature.seconds import estimate_kfac_seconds
from ssla.curvature.structure import (
    Eigenbasis,
    Extent,
    NoFactorError,
    Operator,
    Structure,
    has_constant_rows,
    make_factorisation_error_text,
    make_mismatch_text,
)
from ssla.maths.linalg import symmetric_product
from ssla.maths.roots import Root, ScaledRoot, full_root

EXPAND, REDUCE = "expand", "reduce"
FULL, DIAGONAL = "full", "diagonal"
# Profiles of the output scales (see LayerOperator.profiles). Head of clinc150 (shared data), 5,500
# inputs in and out of the distribution, prior precisions 1,000, 30, 1 and 0.01: 5, 9, 14 and 15
# profiles, at most 3e-7 of the largest entry left over.
MIXTURES, MIXTURE_SEED, MIXTURE_SPREAD = 64, 0, 2.0
PROFILE_TOLERANCE, MOST_PROFILES = 1e-8, 24
TINY = 1e-300  # keeps a division by zero away where all eigenvalues are equal
NEGATIVE = 1e-12  # a guess: share of the largest entry below which a negative value is rounding
SMALLEST_EIGENVALUE = 1e-14  # share of the largest one below which H has no factor: rounding error
NO_POSITIONS, NO_VALUES = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """Sums of one layer, whose statistics are S = G ⊗ A / count."""

    positions: Tensor  # (out, in): the indices of the layer's weights in θ
    A: Tensor  # Σ w a aᵀ (in, in)
    G: Tensor  # Σ w δᵀΛδ (out, out), or its diagonal (out,)
    count: float  # Σ w over rows and positions

    def merge(self, other: LayerFactors) -> LayerFactors:
        """Return the sums of both data sets."""
        return replace(self, A=self.A + other.A, G=self.G + other.G, count=self.count + other.count)

    def merge_in_place(self, other: LayerFactors) -> LayerFactors:
        """Return the sums of both data sets, which overwrite A and G of this object."""
        self.A.add_(other.A)
        self.G.add_(other.G)
        return replace(self, count=self.count + other.count)

    def with_output_factor(self, G: Tensor) -> LayerFactors:
        """Return the sums with another output factor G (out, out) or (out,).

        The eigendecomposition of the input factor is kept if it is there.
        """
        changed = replace(self, G=G)
        # A cached property keeps its value in __dict__ under its own name.
        if "input_eigendecomposition" in self.__dict__:
            changed.__dict__["input_eigendecomposition"] = self.input_eigendecomposition
        return changed

    @cached_property
    def input_eigendecomposition(self) -> tuple[Tensor, Tensor]:
        """Return the eigenvalues λ_A (in,) and eigenvectors Q_A (in, in) of A/count."""
        values, vectors = torch.linalg.eigh(self.A / self.count)
        return values.clamp_min(0), vectors

    @cached_property
    def eigendecomposition(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return eigenvalues and eigenvectors λ_A, Q_A of A/count and λ_G, Q_G of G.

        Q_G is None, which stands for the identity, if G is a diagonal.
        """
        if self.G.dim() == 1:
            return *self.input_eigendecomposition, self.G.clamp_min(0), None
        values_g, vectors_g = torch.linalg.eigh(self.G)
        return *self.input_eigendecomposition, values_g.clamp_min(0), vectors_g


@dataclass(frozen=True, eq=False)
class LayerOperator:
    """(Q_G ⊗ Q_A) diag(spectrum) (Q_G ⊗ Q_A)ᵀ on one layer's (out, in) entries."""

    positions: Tensor  # (out, in)
    basis_a: Tensor  # Q_A (in, in)
    basis_g: Tensor | None  # Q_G (out, out); None: the identity
    spectrum: Tensor  # (out, in): eigenvalues of H

    @cached_property
    def _single_basis_g(self) -> Tensor | None:
        """Return Q_G (out, out) in float32; None for the identity."""
        return None if self.basis_g is None else self.basis_g.float()

    def get_outputs_basis(self, dtype: torch.dtype) -> Tensor | None:
        """Return Q_G (out, out) in a dtype; None for the identity.

        The float32 form is kept, because every batch of a float32 network asks for it.
        """
        if dtype == torch.float32 or self.basis_g is None:
            return self._single_basis_g
        return self.basis_g.to(dtype)

    @cached_property
    def profiles(self) -> Tensor:
        """Return orthonormal u (r, C) whose combinations Σ_k c_k u_k give √v of any row.

        v (C,) are the `variances` of a row of a last layer, and ψ its features in the eigenbasis.
        The error is about 3e-7 of the largest entry of √v (see the constants above). With the
        eigenvalues a_i of the input factor and b_j of the output factor, v_j = Σ_i ψ_i² / (a_i b_j
        + τ). That is a smooth function of log b_j, a mixture of shifted logistic functions, for
        every ψ. So few functions span √v of all rows.

        They are the leading singular vectors of √v for fixed random mixtures ψ². These range over
        rows like those of the data (ψ_i² in proportion to a_i), rows without any direction of the
        data (ψ_i² equal), and rows between.
        """
        # a_i up to a factor: the spectrum a_i b_j + τ varies by a_i (max b − min b) over outputs.
        input_values = self.spectrum.amax(0) - self.spectrum.amin(0)
        input_values = input_values / input_values.max().clamp_min(TINY)
        generator = torch.Generator().manual_seed(MIXTURE_SEED)
        normals = torch.randn(MIXTURES, len(input_values), dtype=torch.float64, generator=generator)
        uneven = (MIXTURE_SPREAD * normals).exp()
        mixtures = torch.cat([uneven * input_values**power for power in (1.0, 0.5, 0.0)])  # ψ²
        scales = (mixtures @ (1 / self.spectrum).mT).sqrt()  # √v (3·MIXTURES, C)
        _, values, vectors = torch.linalg.svd(
            scales / scales.amax(1, keepdim=True), full_matrices=False
        )
        count = int((values > PROFILE_TOLERANCE * values[0]).sum())
        leading: Tensor = vectors[: min(count, MOST_PROFILES)]
        return leading.contiguous()

    def compute_profiles(self) -> Tensor:
        """Return `profiles` (r, C).

        `ScaledRoot` holds this method, so that the profiles are computed only where they are used.
        """
        return self.profiles

    def rotate(self, block: LayerBlock) -> LayerBlock:
        """Return J (Q_G ⊗ Q_A), the layer's part of J in the eigenbasis, as a block."""
        a = block.a @ self.basis_a.to(block.a.dtype)
        if self.basis_g is None:
            return LayerBlock(self.positions, a, block.delta)
        return LayerBlock(self.positions, a, block.delta @ self.basis_g.to(block.a.dtype))

    def variances(self, J: Features, weights: Tensor) -> Tensor:
        """Compute v (B, C) with J (Q_G ⊗ Q_A) diag(w) (Q_G ⊗ Q_A)ᵀ Jᵀ = Q_G diag(v) Q_Gᵀ.

        J: that of a last layer. weights: w (out, in); with w = 1/spectrum, v are the variances of
        the outputs in the basis Q_G.
        """
        return J.rotated_squares(self.basis_a) @ weights.mT.to(J.dtype)

    def solve(self, v: Tensor) -> Tensor:
        """Compute H⁻¹ v on the layer's entries.  (…, out, in) -> (…, out, in)."""
        rotated = (v if self.basis_g is None else self.basis_g.mT @ v) @ self.basis_a
        return self.rotate_back(rotated / self.spectrum)

    def rotate_back(self, v: Tensor) -> Tensor:
        """Compute Q_G v Q_Aᵀ from v in the eigenbasis.  (…, out, in) -> (…, out, in)."""
        return (v if self.basis_g is None else self.basis_g @ v) @ self.basis_a.mT

    def compute_entry_variances(self) -> Tensor:
        """Compute the diagonal of the layer's H⁻¹ (out, in)."""
        inverse = 1 / self.spectrum
        by_outputs = inverse if self.basis_g is None else self.basis_g**2 @ inverse
        return by_outputs @ (self.basis_a**2).mT


@dataclass(frozen=True, eq=False)
class KfacOperator:
    """H⁻¹ as blocks: one for each layer, and a diagonal for the other parameters."""

    layers: tuple[LayerOperator, ...]
    rest_positions: Tensor  # (P_r,)
    rest: Tensor  # (P_r,) diagonal of H
    size: int

    def _compute_weighted_quadratic(
        self, J: Jacobian, layer_weights: list[Tensor], rest_weights: Tensor
    ) -> Tensor:
        """Compute J M Jᵀ (B, C, C) for an M that is diagonal in the eigenbases.

        layer_weights: the diagonal of M (out, in) for each layer; rest_weights (P_r,).
        """
        if isinstance(J, Features):
            return self._compute_last_layer_quadratic(J, layer_weights)
        return reduce(torch.add, self._yield_quadratic_terms(J, layer_weights, rest_weights))

    def _yield_quadratic_terms(
        self, J: Jacobian, layer_weights: list[Tensor], rest_weights: Tensor
    ) -> Iterator[Tensor]:
        """Yield the terms (B, C, C) of `_compute_weighted_quadratic`, which are to be summed.

        The arguments are those of that method. There is one for each layer, then one for the
        parameters outside the layers, if any.
        """
        for op, block, weights in zip(
            self.layers, yield_layer_blocks(J), layer_weights, strict=True
        ):
            yield op.rotate(block).weighted_covariance(weights)
        columns = find_rest_block(J)
        if columns is not None:
            yield columns.weighted_covariance(rest_weights)

    def _compute_last_layer_quadratic(self, J: Features, layer_weights: list[Tensor]) -> Tensor:
        """Compute J M Jᵀ = Q_G diag(v) Q_Gᵀ (B, C, C) of a last layer.

        layer_weights: the diagonal of M (out, in), for the only layer.
        """
        (op,) = self.layers
        (weights,) = layer_weights
        basis = op.get_outputs_basis(J.dtype)
        v = op.variances(J, weights)
        if basis is None:
            return torch.diag_embed(v)
        return symmetric_product(basis * v.unsqueeze(-2), basis)

    def covariance(self, J: Jacobian) -> Tensor:
        """Compute K = J H⁻¹ Jᵀ in the dtype of J (B, C, P).  -> (B, C, C)."""
        return self._compute_weighted_quadratic(
            J, [1 / op.spectrum for op in self.layers], 1 / self.rest
        )

    def root(self, J: Jacobian) -> Root:
        """Compute a root R of K = R Rᵀ.

        For a last layer it is Q_G diag(√v), with v the `variances` of the layer: K is not
        factorised, and nothing of size (B, C, C) is formed.
        """
        if not isinstance(J, Features):
            return full_root(self.covariance(J))
        (op,) = self.layers
        scale = op.variances(J, 1 / op.spectrum).sqrt()
        profiles = None if op.basis_g is None else op.compute_profiles
        return ScaledRoot(scale, op.get_outputs_basis(J.dtype), profiles)

    def sandwich_covariance(self, J: Jacobian, precisions: Tensor) -> Tensor:
        """Compute J H⁻¹ diag(m) H⁻¹ Jᵀ for precisions m ≥ 0.  (P,) -> (B, C, C).

        m must be constant inside each layer: only the layer's first entry is used.
        """
        layer_precisions = [precisions[op.positions].flatten()[0] for op in self.layers]
        weights = [m / op.spectrum**2 for m, op in zip(layer_precisions, self.layers, strict=True)]
        return self._compute_weighted_quadratic(
            J, weights, precisions[self.rest_positions] / self.rest**2
        )

    def logdet(self) -> float:
        """Compute log |H|."""
        return float(self.rest.log().sum()) + sum(
            float(op.spectrum.log().sum()) for op in self.layers
        )

    def solve(self, v: Tensor) -> Tensor:
        """Compute H⁻¹ v.  (P,) -> (P,)."""
        out = torch.zeros_like(v)
        for op in self.layers:
            out[op.positions] = op.solve(v[op.positions])
        out[self.rest_positions] = v[self.rest_positions] / self.rest
        return out

    def solve_many(self, V: Tensor) -> Tensor:
        """Compute H⁻¹ V.  (P, k) -> (P, k)."""
        out = torch.zeros_like(V)
        for op in self.layers:
            out[op.positions] = op.solve(V[op.positions].movedim(-1, 0)).movedim(0, -1)
        out[self.rest_positions] = V[self.rest_positions] / self.rest[:, None]
        return out

    def variances(self) -> Tensor:
        """Compute the diagonal of H⁻¹ (P,)."""
        out = torch.zeros(self.size, dtype=torch.float64)
        for op in self.layers:
            out[op.positions] = op.compute_entry_variances()
        out[self.rest_positions] = 1 / self.rest
        return out

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n vectors from N(0, H⁻¹).  -> (n, P).

        White noise is scaled by the standard deviations in the eigenbases, then rotated back.
        """
        out = torch.randn(n, self.size, dtype=torch.float64, generator=generator)
        for op in self.layers:
            out[:, op.positions] = op.rotate_back(out[:, op.positions] / op.spectrum.sqrt())
        out[:, self.rest_positions] /= self.rest.sqrt()
        return out


@dataclass(frozen=True, eq=False)
class Kfac(Structure):
    """Statistics of all layers.

    sharing: how positions of one row are counted, "expand" or "reduce". output_factor: "full" or
    "diagonal"; None means that a fit chooses by the number of classes, and "full" outside a fit.
    """

    sharing: str = EXPAND
    size: int = 0
    layers: tuple[LayerFactors, ...] = ()
    rest_positions: Tensor = NO_POSITIONS
    rest: Tensor = NO_VALUES  # (P_r,) diagonal
    output_factor: str | None = None

    name = "kfac"
    needs_jacobian_entries = False
    couples_all_parameters = False
    exact_for_one_precision = True
    by_layers = True

    def __post_init__(self) -> None:
        """Check the names of the options; raise ValueError for an unknown one."""
        check_name("sharing", self.sharing, (EXPAND, REDUCE))
        if self.output_factor is not None:
            check_name("output_factor", self.output_factor, (FULL, DIAGONAL))

    @property
    def diagonal_outputs(self) -> bool:
        """Return whether only the diagonal of the output factor is summed."""
        return self.output_factor == DIAGONAL

    @property
    def is_empty(self) -> bool:
        """Return whether no data were added yet, so that the layers' shapes are not known."""
        return not self.layers and not self.rest.numel()

    def for_many_classes(self) -> Kfac:
        """Return the form with a diagonal output factor, unless the user chose a form."""
        return replace(self, output_factor=DIAGONAL) if self.output_factor is None else self

    @property
    def drops_negative_curvature(self) -> bool:
        """Return whether an output factor has a negative eigenvalue, which `with_prior` clamps."""
        for layer in self.layers:
            values = layer.G if layer.G.dim() == 1 else torch.linalg.eigvalsh(layer.G)
            if bool((values < -NEGATIVE * values.abs().max()).any()):
                return True
        return bool((self.rest < 0).any())

    def zero(self, size: int) -> Kfac:
        """Return the statistics of no data, for P = size parameters."""
        return Kfac(self.sharing, size, output_factor=self.output_factor)

    def add(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None = None, inputs: bool = True
    ) -> Kfac:
        """Return the statistics with one more batch; precision Λ (B, C, C), row weights (B,).

        For a last layer the sum Σ_i Λ_i (1, C, C) is enough as precision, and with a diagonal
        output factor Σ_i diag Λ_i (1, C). If `inputs` is false, the input factor of a last layer is
        left empty: `with_inputs_of` takes it from an earlier pass over the same rows.
        """
        return self.merge(self._sum_batch(J, precision, weights, inputs))

    def accumulate(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None = None, inputs: bool = True
    ) -> Kfac:
        """Return the statistics with one more batch, as `add` does, but change factors in place.

        The old statistics must not be used afterwards.
        """
        batch = self._sum_batch(J, precision, weights, inputs)
        if self.is_empty:
            return batch
        layers = tuple(
            layer.merge_in_place(more)
            for layer, more in zip(self.layers, batch.layers, strict=True)
        )
        return replace(self, layers=layers, rest=self.rest + batch.rest)

    def _sum_batch(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None, inputs: bool
    ) -> Kfac:
        """Return the statistics of one batch alone; the arguments are those of `add`."""
        if weights is None:
            rows = len(J.phi) if isinstance(J, Features) else len(precision)
            weights = torch.ones(rows, dtype=torch.float64)
        batch = self.zero(J.size)
        if isinstance(J, Features):
            return replace(
                batch, layers=(self._sum_last_layer_factors(J, precision, weights, inputs),)
            )
        layers = tuple(
            self._sum_layer_factors(block, precision, weights) for block in yield_layer_blocks(J)
        )
        columns = find_rest_block(J)
        if columns is None:
            return replace(batch, layers=layers)
        squares = columns.square_sum(precision)
        return replace(batch, layers=layers, rest_positions=columns.positions, rest=squares)

    def _sum_last_layer_factors(
        self, J: Features, precision: Tensor, weights: Tensor, inputs: bool
    ) -> LayerFactors:
        """Return the factors of a last layer for one batch; the arguments are those of `add`.

        J = φᵀ ⊗ I, so A is a sum of φφᵀ and G is the sum of Λ itself.
        """
        A = J.second_moment(weights) if inputs else torch.zeros(0, 0, dtype=torch.float64)
        if self.diagonal_outputs:
            # A precision of two dimensions is the diagonal already.
            diagonals = precision.diagonal(dim1=-2, dim2=-1) if precision.dim() == 3 else precision
            G = diagonals.sum(0)
        else:
            total = precision.sum(0) if len(precision) > 1 else precision[0]
            G = (total + total.mT).div_(2)
        return LayerFactors(_list_last_layer_positions(J), A, G, float(weights.sum()))

    def _sum_layer_factors(
        self, block: LayerBlock, precision: Tensor, weights: Tensor
    ) -> LayerFactors:
        """Return the factors of one layer for one batch, from its block of J.

        precision: Λ (B, C, C). weights: of rows (B,). The factors are those of the module's
        docstring, by `sharing`.
        """
        a, delta = block.a, block.delta  # (B, T, in), (B, C, T, out)
        if self.sharing == REDUCE:
            a, delta = a.mean(1, keepdim=True), delta.sum(2, keepdim=True)
        weighted = (a * weights[:, None, None]).flatten(0, 1)
        A = weighted.mT @ a.flatten(0, 1)
        precision_delta = torch.einsum("bcd,bdto->bcto", precision, delta)  # Λδ
        if self.diagonal_outputs:
            G = (delta * precision_delta).sum((0, 1, 2))
        else:
            G = delta.flatten(0, 2).mT @ precision_delta.flatten(0, 2)
            G = (G + G.mT) / 2
        return LayerFactors(block.positions, A, G, float(weights.sum()) * a.shape[1])

    def with_inputs_of(self, other: Structure) -> Kfac:
        """Return the statistics with the input factors of `other`, a sum over the same rows.

        The eigendecompositions of these factors are kept. Raises AssertionError unless other is a
        Kfac.
        """
        assert isinstance(other, Kfac)
        layers = tuple(
            earlier.with_output_factor(layer.G)
            for layer, earlier in zip(self.layers, other.layers, strict=True)
        )
        return replace(self, layers=layers)

    def with_output_factor(self, G: Tensor) -> Kfac:
        """Return the statistics of a last layer with another output factor.

        G (C, C) is the full matrix, of which a diagonal output factor keeps the diagonal.
        """
        (layer,) = self.layers
        changed = layer.with_output_factor(G.diagonal().clone() if self.diagonal_outputs else G)
        return replace(self, layers=(changed,))

    def _require_same_kind(self, other: Structure) -> Kfac:
        """Return the other statistics, as a Kfac.

        Raises ValueError if they are of another structure, or have other options or another size.
        """
        if (
            not isinstance(other, Kfac)
            or other.size != self.size
            or other.sharing != self.sharing
            or other.diagonal_outputs != self.diagonal_outputs
        ):
            raise ValueError(make_mismatch_text("kfac", other))
        return other

    def merge(self, other: Structure) -> Kfac:
        """Return the statistics of both data sets; raise ValueError if they cannot be merged."""
        other = self._require_same_kind(other)
        if self.is_empty or other.is_empty:
            return other if self.is_empty else self
        layers = tuple(a.merge(b) for a, b in zip(self.layers, other.layers, strict=True))
        return replace(self, layers=layers, rest=self.rest + other.rest)

    def mix_with(self, other: Structure, share: float) -> Kfac:
        """Return (1 − share) of these statistics plus `share` of others of the same rows.

        Raises ValueError if the others have other options or another size.
        """
        other = self._require_same_kind(other)
        # A is the same in both, because the rows are the same.
        layers = tuple(
            layer.with_output_factor((1 - share) * layer.G + share * other_layer.G)
            for layer, other_layer in zip(self.layers, other.layers, strict=True)
        )
        return replace(self, layers=layers, rest=(1 - share) * self.rest + share * other.rest)

    def positive_part(self) -> Kfac:
        """Return the statistics without directions of negative curvature.

        Only the diagonal is changed here: `LayerFactors.eigendecomposition` clamps the eigenvalues
        of the factors.
        """
        return replace(self, rest=self.rest.clamp_min(0))

    def eigenbasis(self, precisions: Tensor) -> Eigenbasis | None:
        """Return the eigenbases of the layers; None for precisions (k, P) that vary in a layer."""
        values = torch.zeros_like(precisions[0])
        blocks = []
        for layer in self.layers:
            if not has_constant_rows(precisions[:, layer.positions.flatten()]):
                return None
            values_a, basis_a, values_g, basis_g = layer.eigendecomposition
            values[layer.positions] = values_g[:, None] * values_a[None, :]
            blocks.append((layer.positions, basis_a, basis_g))
        values[self.rest_positions] = self.rest
        return Eigenbasis(values, tuple(blocks))

    def check_layers(self, shapes: tuple[tuple[int, int], ...]) -> None:
        """Raise ValueError unless the factors fit layers with these (inputs, outputs)."""
        if shapes != tuple((layer.A.shape[0], layer.positions.shape[0]) for layer in self.layers):
            raise ValueError("its Kronecker factors are not those of the network's layers")

    def scale_both_sides(self, factors: Tensor) -> Kfac:
        """Return the statistics of D S D for D = diag(factors), factors (P,).

        Raises ValueError if the factors vary within a row of a layer's weight, because D S D is
        not a Kronecker product then.
        """
        layers = []
        for layer in self.layers:
            entry_factors = factors[layer.positions]  # (out, in)
            if not has_constant_rows(entry_factors):
                raise ValueError(
                    "kfac can be rescaled by output only: the factors vary within a row of a "
                    "layer's weight."
                )
            d = entry_factors[:, 0]
            squares = d**2 if layer.G.dim() == 1 else d[:, None] * d
            layers.append(layer.with_output_factor(layer.G * squares))
        rest = self.rest * factors[self.rest_positions] ** 2
        return replace(self, layers=tuple(layers), rest=rest)

    def push(self, direction: Tensor) -> Tensor:
        """Compute the product S d with a direction d.  (P,) -> (P,)."""
        out = torch.zeros_like(direction)
        for layer in self.layers:
            d = direction[layer.positions]
            by_outputs = layer.G[:, None] * d if layer.G.dim() == 1 else layer.G @ d
            out[layer.positions] = by_outputs @ layer.A / layer.count
        out[self.rest_positions] = self.rest * direction[self.rest_positions]
        return out

    def trace(self, operator: Operator) -> float:
        """Compute tr(S H⁻¹) for an operator with Kronecker factors of the same layers.

        Raises AssertionError for another operator.
        """
        assert isinstance(operator, KfacOperator)
        total = float((self.rest / operator.rest).sum())
        for layer, op in zip(self.layers, operator.layers, strict=True):
            # H is diagonal in the operator's eigenbasis, so the trace needs only the diagonals of
            # Q_AᵀAQ_A and Q_GᵀGQ_G.
            inputs = (op.basis_a * (layer.A @ op.basis_a)).sum(0) / layer.count
            outputs = layer.G
            if layer.G.dim() == 2:
                assert op.basis_g is not None  # it is None for a diagonal output factor only
                outputs = (op.basis_g * (layer.G @ op.basis_g)).sum(0)
            total += float((outputs[:, None] * inputs / op.spectrum).sum())
        return total

    def with_prior(self, precision: Tensor) -> KfacOperator:
        """Factorise H = S + the prior's precision in the eigenbases of the factors.

        precision: (P,), or (P, P), of which only the diagonal is used. Raises ValueError if it
        varies inside a layer, and NoFactorError if H is singular in double precision.
        """
        diagonal = precision if precision.dim() == 1 else precision.diagonal()
        operators = []
        for layer in self.layers:
            tau = diagonal[layer.positions].flatten()
            if not bool((tau == tau[0]).all()):
                raise ValueError(
                    "structure='kfac' needs one prior precision for each layer (the same for "
                    "weight and bias), but it varies inside one. Give a number or a dict by layer, "
                    "or use structure='dense' or 'diag'."
                )
            values_a, basis_a, values_g, basis_g = layer.eigendecomposition
            spectrum = values_g[:, None] * values_a[None, :] + tau[0]
            operators.append(LayerOperator(layer.positions, basis_a, basis_g, spectrum))

        rest = self.rest + diagonal[self.rest_positions]
        singular = any(
            float(op.spectrum.min()) <= SMALLEST_EIGENVALUE * float(op.spectrum.max())
            for op in operators
        )
        if singular or not bool((rest > 0).all()):
            raise NoFactorError(
                make_factorisation_error_text(precision, " (a Kronecker factor is singular)")
            )

        return KfacOperator(tuple(operators), self.rest_positions, rest, self.size)

    def memory(self, extent: Extent) -> int:
        """Estimate the bytes that a fit needs at its peak, as in the protocol.

        The bytes are those of the factors, of a batch's factors, and of the eigenbases with their
        workspace. The spectrum, of the size of θ, adds to them.
        """
        factors = sum(
            inputs * inputs + (outputs if self.diagonal_outputs else outputs * outputs)
            for inputs, outputs in extent.layers
        )
        # Counted in fits (tests/fitting/test_memory.py): the eigendecomposition alone takes four.
        # A number in float64 has 8 bytes.
        copies = 8 if extent.averages else 7
        return copies * 8 * (factors + extent.parameters_outside_layers) + 8 * extent.size

    def estimate_seconds(self, extent: Extent) -> float:
        """Estimate the seconds of a fit on one core, as in the protocol."""
        return estimate_kfac_seconds(extent)


def yield_layer_blocks(J: Jacobian) -> Iterator[LayerBlock]:
    """Yield the part of J of each layer with a Kronecker form.

    Raises TypeError for a Jacobian that is not stored by layers.
    """
    if isinstance(J, Features):
        # A last layer has one position and δ = I.
        phi = J.with_ones()
        eye = torch.eye(J.outputs, dtype=phi.dtype)
        delta = eye[None, :, None, :].expand(phi.shape[0], -1, -1, -1)  # (B, C, 1, C)
        yield LayerBlock(_list_last_layer_positions(J), phi.unsqueeze(1), delta)
    elif isinstance(J, LayerJacobian):
        yield from J.blocks()
    else:
        raise TypeError("structure='kfac' needs a Jacobian by layers, but got a plain one.")


def find_rest_block(J: Jacobian) -> RestBlock | None:
    """Return the columns of J for parameters outside the layers; None if there are none."""
    return J.rest if isinstance(J, LayerJacobian) else None


def needs_summed_precision_only(structure: Structure, J: Jacobian) -> bool:
    """Return whether `structure.add` needs no more of Λ than its sum over rows.

    This is so for a last layer with Kronecker factors.
    """
    return structure.by_layers and isinstance(J, Features)


def _list_last_layer_positions(J: Features) -> Tensor:
    """Return the indices (C, F) of a last layer's weights in θ."""
    return torch.arange(J.size).reshape(J.outputs, -1)
