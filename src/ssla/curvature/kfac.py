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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ssla._checks import one_of
from ssla.curvature.jacobians import Features, Jacobian, LayerBlock, LayerJacobian, RestBlock
from ssla.curvature.structure import (
    Eigenbasis,
    Extent,
    NoFactorError,
    Operator,
    Structure,
    constant,
    mismatch,
    no_factor,
)
from ssla.maths.linalg import symmetric_product
from ssla.maths.roots import Root, ScaledRoot, full_root

EXPAND, REDUCE = "expand", "reduce"
FULL, DIAGONAL = "full", "diagonal"
MANY_CLASSES = 1000  # beyond, a fit takes a diagonal output factor for a last layer by default
# Profiles of the output scales (see LayerOperator.profiles). Head of clinc150 (shared data), 5,500
# inputs in and out of the distribution, prior precisions 1,000, 30, 1 and 0.01: 5, 9, 14 and 15
# profiles, at most 3e-7 of the largest entry left over.
MIXTURES, MIXTURE_SEED, MIXTURE_SPREAD = 64, 0, 2.0
PROFILE_TOLERANCE, MOST_PROFILES = 1e-8, 24
NO_POSITIONS, NO_VALUES = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """Sums of one layer."""

    positions: Tensor  # (out, in)
    A: Tensor  # Σ w a aᵀ (in, in)
    G: Tensor  # Σ w δᵀΛδ (out, out), or its diagonal (out,)
    count: float  # Σ w over rows and positions

    def merge(self, other: LayerFactors) -> LayerFactors:
        return replace(self, A=self.A + other.A, G=self.G + other.G, count=self.count + other.count)

    def absorb(self, other: LayerFactors) -> LayerFactors:
        """As `merge`, in place."""
        return replace(
            self, A=self.A.add_(other.A), G=self.G.add_(other.G), count=self.count + other.count
        )

    def with_outputs(self, G: Tensor) -> LayerFactors:
        """The same inputs, whose eigenbasis is kept, with another output factor."""
        changed = replace(self, G=G)
        if "input_eigen" in self.__dict__:
            changed.__dict__["input_eigen"] = self.input_eigen
        return changed

    @cached_property
    def input_eigen(self) -> tuple[Tensor, Tensor]:
        """λ_A and Q_A of A/count."""
        values, vectors = torch.linalg.eigh(self.A / self.count)
        return values.clamp_min(0), vectors

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """λ_A, Q_A, λ_G, Q_G of A/count and G; Q_G of a diagonal is None: the identity."""
        if self.G.dim() == 1:
            return *self.input_eigen, self.G.clamp_min(0), None
        values_g, vectors_g = torch.linalg.eigh(self.G)
        return *self.input_eigen, values_g.clamp_min(0), vectors_g


@dataclass(frozen=True, eq=False)
class LayerOperator:
    """(Q_G ⊗ Q_A) diag(spectrum) (Q_G ⊗ Q_A)ᵀ on one layer's (out, in) entries."""

    positions: Tensor
    basis_a: Tensor
    basis_g: Tensor | None  # None: the identity
    spectrum: Tensor  # (out, in): eigenvalues of H

    @cached_property
    def _single_basis_g(self) -> Tensor | None:
        return None if self.basis_g is None else self.basis_g.float()

    def outputs_basis(self, dtype: torch.dtype) -> Tensor | None:
        """Q_G, converted once."""
        if dtype == torch.float32 or self.basis_g is None:
            return self._single_basis_g
        return self.basis_g.to(dtype)

    @cached_property
    def profiles(self) -> Tensor:
        """u (r, C), orthonormal: √v of any row of a last layer is Σ_k c_k u_k, to about 3e-7 of its
        largest entry.

        With eigenvalues a_i of the inputs' factor and b_j of the outputs', v_j = Σ_i ψ_i² / (a_i
        b_j + τ). That is one smooth function of log b_j, a mixture of shifted logistic functions,
        whatever the row's ψ. So few functions span √v of all rows. They are the leading singular
        vectors of √v for fixed mixtures ψ² that range over rows like those of the data (ψ_i² in
        proportion to a_i), rows without any direction of the data (ψ_i² equal), and rows between.
        """
        inside = self.spectrum.amax(0) - self.spectrum.amin(0)  # in proportion to a
        inside = inside / inside.max().clamp_min(1e-300)
        generator = torch.Generator().manual_seed(MIXTURE_SEED)
        normals = torch.randn(MIXTURES, len(inside), dtype=torch.float64, generator=generator)
        uneven = (MIXTURE_SPREAD * normals).exp()
        mixtures = torch.cat([uneven * inside**power for power in (1.0, 0.5, 0.0)])
        scales = (mixtures @ (1 / self.spectrum).mT).sqrt()
        _, values, vectors = torch.linalg.svd(
            scales / scales.amax(1, keepdim=True), full_matrices=False
        )
        count = int((values > PROFILE_TOLERANCE * values[0]).sum())
        leading: Tensor = vectors[: min(count, MOST_PROFILES)]
        return leading.contiguous()

    def outputs_profiles(self) -> Tensor:
        """`profiles`, found when they are first asked for."""
        return self.profiles

    def rotate(self, block: LayerBlock) -> LayerBlock:
        """The block's J in the eigenbasis."""
        delta = (
            block.delta if self.basis_g is None else block.delta @ self.basis_g.to(block.a.dtype)
        )
        return LayerBlock(self.positions, block.a @ self.basis_a.to(block.a.dtype), delta)

    def variances(self, J: Features, weights: Tensor) -> Tensor:
        """v (B, C) with J (Q_G ⊗ Q_A) diag(w) (Q_G ⊗ Q_A)ᵀ Jᵀ = Q_G diag(v) Q_Gᵀ, for a last layer.

        w (out, in).
        """
        return J.rotated_squares(self.basis_a) @ weights.mT.to(J.dtype)

    def solve(self, v: Tensor) -> Tensor:
        """(…, out, in) -> (…, out, in)."""
        inside = (v if self.basis_g is None else self.basis_g.mT @ v) @ self.basis_a
        return self.rotate_back(inside / self.spectrum)

    def rotate_back(self, v: Tensor) -> Tensor:
        """Q_G v Q_Aᵀ: out of the eigenbasis.  (…, out, in) -> (…, out, in)."""
        return (v if self.basis_g is None else self.basis_g @ v) @ self.basis_a.mT

    def entry_variances(self) -> Tensor:
        """The diagonal of the inverse (out, in)."""
        inside = 1 / self.spectrum
        return (inside if self.basis_g is None else self.basis_g**2 @ inside) @ (self.basis_a**2).mT


@dataclass(frozen=True, eq=False)
class KfacOperator:
    """H⁻¹ of all layers, and of the diagonal for other parameters."""

    layers: tuple[LayerOperator, ...]
    rest_positions: Tensor
    rest: Tensor  # (P_r,) diagonal of H
    size: int

    def _quadratic(self, J: Jacobian, layer_weights: list[Tensor], rest_weights: Tensor) -> Tensor:
        if isinstance(J, Features):  # δ = I: K = Q_G diag(v) Q_Gᵀ
            (op,), (weights,) = self.layers, layer_weights
            basis, v = op.outputs_basis(J.dtype), op.variances(J, weights)
            return (
                torch.diag_embed(v)
                if basis is None
                else symmetric_product(basis * v.unsqueeze(-2), basis)
            )
        total: Tensor | None = None
        for operator, block, weights in zip(
            self.layers, layer_blocks(J), layer_weights, strict=True
        ):
            K = operator.rotate(block).weighted_covariance(weights)
            total = K if total is None else total + K
        rest = rest_block(J)
        if rest is not None:
            K = symmetric_product(rest.values * rest_weights.to(rest.values.dtype), rest.values)
            total = K if total is None else total + K
        assert total is not None
        return total

    def covariance(self, J: Jacobian) -> Tensor:
        return self._quadratic(J, [1 / op.spectrum for op in self.layers], 1 / self.rest)

    def root(self, J: Jacobian) -> Root:
        """Of a last layer Q_G diag(√v): no factorisation, and nothing of size (B, C, C)."""
        if isinstance(J, Features):
            (op,) = self.layers
            profiles = None if op.basis_g is None else op.outputs_profiles
            return ScaledRoot(
                op.variances(J, 1 / op.spectrum).sqrt(), op.outputs_basis(J.dtype), profiles
            )
        return full_root(self.covariance(J))

    def response(self, J: Jacobian, middle: Tensor) -> Tensor:
        levels = [middle[op.positions].flatten()[0] for op in self.layers]
        weights = [m / op.spectrum**2 for m, op in zip(levels, self.layers, strict=True)]
        return self._quadratic(J, weights, middle[self.rest_positions] / self.rest**2)

    def logdet(self) -> float:
        return float(self.rest.log().sum()) + sum(
            float(op.spectrum.log().sum()) for op in self.layers
        )

    def solve(self, v: Tensor) -> Tensor:
        out = torch.zeros_like(v)
        for op in self.layers:
            out[op.positions] = op.solve(v[op.positions])
        out[self.rest_positions] = v[self.rest_positions] / self.rest
        return out

    def solve_many(self, V: Tensor) -> Tensor:
        out = torch.zeros_like(V)
        for op in self.layers:
            out[op.positions] = op.solve(V[op.positions].movedim(-1, 0)).movedim(0, -1)
        out[self.rest_positions] = V[self.rest_positions] / self.rest[:, None]
        return out

    def variances(self) -> Tensor:
        out = torch.zeros(self.size, dtype=torch.float64)
        for op in self.layers:
            out[op.positions] = op.entry_variances()
        out[self.rest_positions] = 1 / self.rest
        return out

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        out = torch.randn(n, self.size, dtype=torch.float64, generator=generator)
        for op in self.layers:
            out[:, op.positions] = op.rotate_back(out[:, op.positions] / op.spectrum.sqrt())
        out[:, self.rest_positions] /= self.rest.sqrt()
        return out


@dataclass(frozen=True, eq=False)
class Kfac(Structure):
    """Statistics of all layers.

    sharing: how positions of one row are counted, "expand" or "reduce". output_factor: "full" or
    "diagonal"; None: as a fit chooses by the number of classes, full elsewhere.
    """

    sharing: str = EXPAND
    size: int = 0
    layers: tuple[LayerFactors, ...] = ()
    rest_positions: Tensor = NO_POSITIONS
    rest: Tensor = NO_VALUES  # (P_r,) diagonal
    output_factor: str | None = None

    name = "kfac"
    materialises = False
    whole = False
    exact_for_one_precision = True
    by_layers = True

    def __post_init__(self) -> None:
        one_of("sharing", self.sharing, (EXPAND, REDUCE))
        if self.output_factor is not None:
            one_of("output_factor", self.output_factor, (FULL, DIAGONAL))

    @property
    def diagonal(self) -> bool:
        """Whether only the diagonal of the output factor is summed."""
        return self.output_factor == DIAGONAL

    @property
    def diagonal_outputs(self) -> bool:
        return self.diagonal

    def for_many_classes(self) -> Kfac:
        """With a diagonal output factor, unless one was asked for."""
        return replace(self, output_factor=DIAGONAL) if self.output_factor is None else self

    def zero(self, size: int) -> Kfac:
        return Kfac(self.sharing, size, output_factor=self.output_factor)

    def add(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None = None, inputs: bool = True
    ) -> Kfac:
        """As for every structure; of a last layer the precision may also be Σ_i Λ_i (1, C, C), with
        the row weights.

        With a diagonal output factor, Σ_i diag Λ_i (1, C) is enough. Without `inputs` the input
        factor of a last layer is left empty: `with_inputs_of` fills it in from an earlier pass over
        the same rows.
        """
        w = torch.ones(
            len(J.phi) if isinstance(J, Features) else len(precision), dtype=torch.float64
        )
        w = w if weights is None else weights
        if isinstance(J, Features):  # δ = I
            A = J.second_moment(w) if inputs else torch.zeros(0, 0, dtype=torch.float64)
            factors = LayerFactors(_last(J), A, self._outputs(precision), float(w.sum()))
            return self.merge(replace(self.zero(J.size), layers=(factors,)))
        found = replace(
            self.zero(J.size),
            layers=tuple(self._factors(block, precision, w) for block in layer_blocks(J)),
        )
        rest = rest_block(J)
        if rest is None:
            return self.merge(found)
        squares = (rest.values * (precision @ rest.values)).sum((0, 1))
        return self.merge(replace(found, rest_positions=rest.positions, rest=squares))

    def with_inputs_of(self, other: Structure) -> Kfac:
        """With the input factors of another sum over the same rows, whose eigenbases are kept."""
        assert isinstance(other, Kfac)
        layers = tuple(
            theirs.with_outputs(mine.G)
            for mine, theirs in zip(self.layers, other.layers, strict=True)
        )
        return replace(self, layers=layers)

    def with_output_factor(self, G: Tensor) -> Kfac:
        """A last layer with another output factor (C, C)."""
        (layer,) = self.layers
        return replace(
            self, layers=(layer.with_outputs(G.diagonal().clone() if self.diagonal else G),)
        )

    def accumulate(
        self, J: Jacobian, precision: Tensor, weights: Tensor | None = None, inputs: bool = True
    ) -> Kfac:
        """As `add`, but the factors are changed in place: for a sum that belongs to the caller
        alone.
        """
        batch = self.zero(J.size).add(J, precision, weights, inputs)
        if self.empty:
            return batch
        layers = tuple(
            layer.absorb(more) for layer, more in zip(self.layers, batch.layers, strict=True)
        )
        return replace(self, layers=layers, rest=self.rest + batch.rest)

    def _outputs(self, precision: Tensor) -> Tensor:
        """The output factor of a last layer: the sum over rows, or its diagonal."""
        if self.diagonal:
            return (
                precision.diagonal(dim1=-2, dim2=-1) if precision.dim() == 3 else precision
            ).sum(0)
        total = precision.sum(0) if len(precision) > 1 else precision[0]
        return (total + total.mT).div_(2)

    def _factors(self, block: LayerBlock, precision: Tensor, weights: Tensor) -> LayerFactors:
        a, delta = block.a, block.delta
        if self.sharing == REDUCE:
            a, delta = a.mean(1, keepdim=True), delta.sum(2, keepdim=True)
        places = a.shape[1]
        weighted = (a * weights[:, None, None]).flatten(0, 1)
        A = weighted.mT @ a.flatten(0, 1)
        turned = torch.einsum("bcd,bdto->bcto", precision, delta)
        if self.diagonal:
            G = (delta * turned).sum((0, 1, 2))
        else:
            G = delta.flatten(0, 2).mT @ turned.flatten(0, 2)
            G = (G + G.mT) / 2
        return LayerFactors(block.positions, A, G, float(weights.sum()) * places)

    def _like(self, other: Structure) -> Kfac:
        """The other statistics; ValueError where they are not of the same kind and parameters."""
        same = isinstance(other, Kfac) and other.size == self.size and other.sharing == self.sharing
        if not isinstance(other, Kfac) or not same or other.diagonal != self.diagonal:
            raise ValueError(mismatch("kfac", other))
        return other

    def merge(self, other: Structure) -> Kfac:
        other = self._like(other)
        if self.empty or other.empty:
            return other if self.empty else self
        layers = tuple(a.merge(b) for a, b in zip(self.layers, other.layers, strict=True))
        return replace(self, layers=layers, rest=self.rest + other.rest)

    @property
    def empty(self) -> bool:
        """No data yet: the shapes of the layers are not known."""
        return not self.layers and not self.rest.numel()

    def mixed(self, other: Structure, share: float) -> Kfac:
        other = self._like(other)
        # A is the same for the same rows
        layers = tuple(
            a.with_outputs((1 - share) * a.G + share * b.G)
            for a, b in zip(self.layers, other.layers, strict=True)
        )
        return replace(self, layers=layers, rest=(1 - share) * self.rest + share * other.rest)

    def positive_part(self) -> Kfac:
        """Eigenvalues of the factors are never taken as negative; the rest may be."""
        return replace(self, rest=self.rest.clamp_min(0))

    def eigenbasis(self, precisions: Tensor) -> Eigenbasis | None:
        values, parts = torch.zeros_like(precisions[0]), []
        for layer in self.layers:
            if not constant(precisions[:, layer.positions.flatten()]):
                return None
            values_a, basis_a, values_g, basis_g = layer.eigen
            values[layer.positions] = values_g[:, None] * values_a[None, :]
            parts.append((layer.positions, basis_a, basis_g))
        values[self.rest_positions] = self.rest
        return Eigenbasis(values, tuple(parts))

    def check_layers(self, shapes: tuple[tuple[int, int], ...]) -> None:
        own = tuple((layer.A.shape[0], layer.positions.shape[0]) for layer in self.layers)
        if own != shapes:
            raise ValueError("its Kronecker factors are not those of the network's layers")

    def scaled(self, factors: Tensor) -> Kfac:
        layers = []
        for layer in self.layers:
            d = factors[layer.positions]
            if not bool((d == d[:, :1]).all()):
                raise ValueError(
                    "kfac can be rescaled by output only: the factors vary within a row of a "
                    "layer's weight."
                )
            each = d[:, 0]
            layers.append(
                layer.with_outputs(
                    layer.G * (each**2 if layer.G.dim() == 1 else each[:, None] * each)
                )
            )
        return replace(
            self, layers=tuple(layers), rest=self.rest * factors[self.rest_positions] ** 2
        )

    def push(self, direction: Tensor) -> Tensor:
        out = torch.zeros_like(direction)
        for layer in self.layers:
            d = direction[layer.positions]
            out[layer.positions] = (
                (layer.G[:, None] * d if layer.G.dim() == 1 else layer.G @ d)
                @ layer.A
                / layer.count
            )
        out[self.rest_positions] = self.rest * direction[self.rest_positions]
        return out

    def trace(self, operator: Operator) -> float:
        assert isinstance(operator, KfacOperator)
        total = float((self.rest / operator.rest).sum())
        for layer, factors in zip(self.layers, operator.layers, strict=True):
            # in the operator's eigenbasis H is diagonal, so only the diagonals of the factors count
            inside = (factors.basis_a * (layer.A @ factors.basis_a)).sum(0) / layer.count
            outside = layer.G
            if layer.G.dim() == 2:
                assert factors.basis_g is not None
                outside = (factors.basis_g * (layer.G @ factors.basis_g)).sum(0)
            total += float((outside[:, None] * inside / factors.spectrum).sum())
        return total

    def with_prior(self, precision: Tensor) -> KfacOperator:
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
            values_a, basis_a, values_g, basis_g = layer.eigen
            spectrum = values_g[:, None] * values_a[None, :] + tau[0]
            operators.append(LayerOperator(layer.positions, basis_a, basis_g, spectrum))
        rest = self.rest + diagonal[self.rest_positions]
        singular = any(
            float(op.spectrum.min()) <= 1e-14 * float(op.spectrum.max()) for op in operators
        )
        if singular or not bool((rest > 0).all()):
            raise NoFactorError(no_factor(precision, " (a Kronecker factor is singular)"))
        return KfacOperator(tuple(operators), self.rest_positions, rest, self.size)

    def memory(self, extent: Extent) -> int:
        """Factors, those of a batch, eigenbases and their workspace; the spectrum has the size
        of θ.
        """
        factors = sum(
            inside * inside + (out if self.diagonal else out * out) for inside, out in extent.layers
        )
        # Counted in fits (tests/fitting/test_memory.py): the eigendecomposition alone takes four.
        copies = 8 if extent.averages else 7
        return copies * 8 * (factors + extent.rest) + 8 * extent.size


def layer_blocks(J: Jacobian) -> Iterator[LayerBlock]:
    """The parts of J with a Kronecker form; a last layer has δ = I."""
    if isinstance(J, Features):
        phi = J.with_ones()
        eye = torch.eye(J.outputs, dtype=phi.dtype)
        yield LayerBlock(
            _last(J), phi.unsqueeze(1), eye[None, :, None, :].expand(phi.shape[0], -1, -1, -1)
        )
    elif isinstance(J, LayerJacobian):
        yield from J.blocks()
    else:
        raise TypeError("structure='kfac' needs a Jacobian by layers, but got a plain one.")


def pools(structure: Structure, J: Jacobian) -> bool:
    """Whether `structure.add` needs no more of the precisions than their sum over rows: a last
    layer with Kronecker factors.
    """
    return structure.by_layers and isinstance(J, Features)


def _last(J: Features) -> Tensor:
    """Positions of a last layer."""
    return torch.arange(J.size).reshape(J.outputs, -1)


def rest_block(J: Jacobian) -> RestBlock | None:
    return J.rest if isinstance(J, LayerJacobian) else None
