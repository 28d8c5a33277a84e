"""Classes: Bernoulli on one logit, Categorical on C logits.

Logits are outputs divided by the temperature T. p is the vector of class probabilities at f, and
e_y the vector with 1 at class y and 0 elsewhere. g and Λ are those of
`ssla.likelihoods.likelihood`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ssla._checks import check_positive, in_plain_torch, is_inside_vmap
from ssla.likelihoods.likelihood import (
    CLOSE,
    SIGMOID,
    SOFTMAX,
    Likelihood,
    check_output_count,
    squeeze_scalar_target,
)
from ssla.likelihoods.support import Classes, Support
from ssla.maths.elementwise import common_shape, softplus_difference
from ssla.maths.quadrature.logistic import logistic_normal


@dataclass(frozen=True, repr=False)
class _Classes(Likelihood):
    """A likelihood of classes, whose outputs are logits times a temperature T.

    T > 1 means that the network is over-confident, T < 1 that it is under-confident.
    """

    temperature: float = 1.0

    @in_plain_torch
    def __post_init__(self) -> None:
        """Check that the temperature is positive; raise ValueError if not."""
        check_positive(f"{type(self).__name__} temperature", torch.tensor(float(self.temperature)))

    def logits(self, f: Tensor) -> Tensor:
        """Return the outputs at temperature 1, f/T, with the shape of f."""
        return f if self.temperature == 1 else f / self.temperature

    def _divide_by_temperature_squared(self, value: Tensor) -> Tensor:
        """Return value/T², of the same shape."""
        # Two divisions, because one by T² would round differently.
        return self.logits(self.logits(value))

    @property
    def logit_temperature(self) -> float:
        """Return the temperature T."""
        return self.temperature

    concave = True
    links = (SIGMOID, SOFTMAX)

    def multiply_dispersion(self, factor: float) -> _Classes:
        """Return the same likelihood with `factor` times the temperature."""
        return replace(self, temperature=self.temperature * factor)

    def dispersion_in_words(self, factor: float) -> str:
        """Return a clause for the report: whether the network is over- or under-confident.

        factor: how many times the temperature the validation rows need.
        """
        if factor > CLOSE:
            return f"the network is over-confident: its logits are {factor:.2g} times too large"
        if factor < 1 / CLOSE:
            return (
                f"the network is under-confident: its logits should be {1 / factor:.2g} times as "
                "large"
            )
        return "the network's confidence is right: no other temperature is clearly better"

    def __repr__(self) -> str:
        """Return the class name, with the temperature if it is not 1."""
        temperature = "" if self.temperature == 1 else f"temperature={self.temperature:.4g}"
        return f"{type(self).__name__}({temperature})"


@dataclass(frozen=True, repr=False)
class Bernoulli(_Classes):
    """Two classes y ∈ {0, 1} with one output f = T · logit P(y = 1).

    With p = σ(f/T) and temperature T: g = (y − p)/T, Λ = p(1−p)/T² (= fisher).
    """

    one_probability = True
    has_log_average = True

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """Return log ∫ p(y|f) N(f; f̂, K) df (B,), with an error of about 1e-8.

        y is (B,), f (B, 1) holds f̂, and K is (B, 1, 1).
        """
        sd = K[:, 0, 0].clamp_min(0).sqrt() / self.temperature
        averages = logistic_normal(self.logits(f)[:, 0], sd)
        return torch.where(squeeze_scalar_target(y, f) > 0, averages.log_one, averages.log_zero)

    def support_for(self, outputs: int) -> Support:
        """Return two classes; raise ValueError unless there is one output."""
        check_output_count(
            "Bernoulli", outputs, 1, "the logit of y = 1; for several classes use Categorical"
        )
        return Classes(2)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return log σ(f/T) for y = 1 and log σ(−f/T) for y = 0, of shape (...)."""
        sign = 2 * squeeze_scalar_target(y, f).to(f.dtype) - 1
        return logsigmoid(sign * self.logits(f)[..., 0])

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return log p(y|f_new) − log p(y|f_old) (...), without cancellation.

        log p is −softplus(−f/T) for y = 1 and −softplus(f/T) for y = 0.
        """
        sign = 2 * squeeze_scalar_target(y, f_new).to(f_new.dtype) - 1
        return -softplus_difference(
            -sign * self.logits(f_old)[..., 0], -sign * self.logits(f_new - f_old)[..., 0]
        )

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return (y − p)/T (..., 1), in the form ±σ(∓f/T)/T that does not cancel."""
        sign = 2 * squeeze_scalar_target(y, f).to(f.dtype) - 1
        slope = sign * torch.sigmoid(-sign * self.logits(f)[..., 0])
        return self.logits(slope.unsqueeze(-1))

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return p(1 − p)/T² (..., 1, 1), which does not depend on y."""
        fisher = self.fisher(f)[..., 0, 0]
        return fisher.expand(common_shape(squeeze_scalar_target(y, f), fisher))[..., None, None]

    def fisher(self, f: Tensor) -> Tensor:
        """Return p(1 − p)/T² (..., 1, 1)."""
        logit = self.logits(f)
        variance = torch.sigmoid(logit) * torch.sigmoid(-logit)
        return self._divide_by_temperature_squared(variance).unsqueeze(-1)

    def mean(self, f: Tensor) -> Tensor:
        """Return p = P(y = 1) (...)."""
        return torch.sigmoid(self.logits(f)[..., 0])

    def variance(self, f: Tensor) -> Tensor:
        """Return p(1 − p) (...), as a product that does not cancel for p near 1."""
        logit = self.logits(f)[..., 0]
        return torch.sigmoid(logit) * torch.sigmoid(-logit)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the class, as integers (n, ...)."""
        p = self.mean(f)
        return torch.bernoulli(p.expand(n, *p.shape), generator=generator).long()


@dataclass(frozen=True, repr=False)
class Categorical(_Classes):
    """Several classes y ∈ {0 … C−1} with C ≥ 2 outputs f = T · logits.

    With p = softmax(f/T) and temperature T: g = (e_y − p)/T, Λ = (diag(p) − ppᵀ)/T² (= fisher).
    """

    softmax = True
    shift_invariant = True

    def support_for(self, outputs: int) -> Support:
        """Return one class for each output; raise ValueError if there is only one output."""
        if outputs < 2:
            raise ValueError(
                "Categorical needs a network with one logit for each class, at least two, but this "
                "one has one output. For one logit use Bernoulli()."
            )
        return Classes(outputs)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return entry y of log softmax(f/T), for y (...) and f (..., C) that broadcast."""
        log_probabilities = torch.log_softmax(self.logits(f), -1)
        shape = common_shape(y, f[..., 0])
        index = y.long().expand(shape).unsqueeze(-1)
        return log_probabilities.expand(*shape, -1).gather(-1, index).squeeze(-1)

    def log_prob_at_nodes(self, y: Tensor, f: Tensor) -> Tensor:
        """Return log p(y|f) (B, J) for y (B,) at f (B, C, J), which is overwritten.

        Only the sum of each node's exponentials is needed, not all probabilities.
        """
        f -= f.amax(1, keepdim=True)
        f /= self.temperature
        logit_of_y = f.gather(1, y.long()[:, None, None].expand(-1, 1, f.shape[2])).squeeze(1)
        return logit_of_y - f.exp_().sum(1).log()

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """Return log p(y|f_new) − log p(y|f_old) (...), without cancellation.

        The result is −log1p Σ_c p_c expm1(Δ_c − Δ_y), with p at f_old and Δ the change of the
        logits. Where some |Δ_c − Δ_y| exceeds one, it is the plain difference, which does not
        cancel there.
        """
        shape = common_shape(y, f_new[..., 0], f_old[..., 0])
        y = y.long().expand(shape)
        step = self.logits(f_new - f_old).expand(*shape, -1)
        step = step - step.gather(-1, y.unsqueeze(-1))
        p_old = torch.softmax(self.logits(f_old), -1)
        close = -torch.log1p((p_old * torch.expm1(step.clamp(-1, 1))).sum(-1))
        is_far = step.abs().amax(-1) > 1
        # Inside torch.func.vmap no step may depend on values: both forms are computed for all rows.
        if is_inside_vmap(is_far):
            return torch.where(is_far, self.log_prob(y, f_new) - self.log_prob(y, f_old), close)
        new, old = (f.expand(*shape, -1)[is_far] for f in (f_new, f_old))
        plain = self.log_prob(y[is_far], new) - self.log_prob(y[is_far], old)
        return close.masked_scatter(is_far, plain)

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        """Return (e_y − p)/T (..., C)."""
        # Column y is Σ_{c≠y} p_c, because 1 − p_y would cancel for p_y near 1.
        is_y = torch.nn.functional.one_hot(y.long(), f.shape[-1]).to(f.dtype)
        p_except_y = _softmax(self.logits(f)) * (1 - is_y)
        return self.logits(is_y * p_except_y.sum(-1, keepdim=True) - p_except_y)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        """Return Λ = (diag(p) − ppᵀ)/T² (..., C, C), which is the same for every y."""
        shape = common_shape(y, f[..., 0])
        return self.fisher(f).expand(*shape, -1, -1)

    def fisher(self, f: Tensor) -> Tensor:
        """Return (diag(p) − ppᵀ)/T² (..., C, C)."""
        p = _softmax(self.logits(f))
        # The result is component-major where f is: products over many rows read it fastest.
        if f.stride(-1) == 1:
            precision = -p.unsqueeze(-1) * p.unsqueeze(-2)
        else:
            p = p.movedim(-1, 0)
            precision = (-p.unsqueeze(0) * p.unsqueeze(1)).movedim((0, 1), (-2, -1))
        # p_c(1 − p_c) as the sum of the other entries, so that rows sum to zero exactly.
        diagonal = precision.diagonal(dim1=-2, dim2=-1)
        diagonal.copy_(-(precision.sum(-1) - diagonal))
        return self._divide_by_temperature_squared(precision)

    # The next five compute products with Λ = (diag(p) − ppᵀ)/T², without a C×C matrix for each row.
    # Λ is the same for every y, so it equals its expectation over y.

    def score_change(self, y: Tensor, f: Tensor, before: Tensor) -> Tensor:
        """Return (p̂ − p)/T (..., C), with p̂ at `before` and p at f; y cancels."""
        return self.logits((self.mean(f) - self.mean(before)).neg_())

    def precision_times(self, y: Tensor, f: Tensor, v: Tensor, fisher: bool = False) -> Tensor:
        """Return Λv = (p∘v − p(pᵀv))/T² (..., C); y and `fisher` change nothing."""
        p = self.mean(f)
        pv = p * v
        return self._divide_by_temperature_squared(pv - p * pv.sum(-1, keepdim=True))

    def precision_diagonal(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        """Return the diagonal (p − p²)/T² (..., C) of Λ; y and `fisher` change nothing."""
        p = self.mean(f)
        return self._divide_by_temperature_squared(p - p * p)

    def precision_trace(self, y: Tensor, f: Tensor, K: Tensor, fisher: bool = False) -> Tensor:
        """Return tr(KΛ) = Σ_c p_c (K_cc − (Kp)_c)/T² (m, b), for f (m, b, C) and K (b, C, C).

        y and `fisher` change nothing.
        """
        p = self.mean(f)
        pK = (p.movedim(0, 1) @ K).movedim(1, 0)  # (m, b, C)
        variances = K.diagonal(dim1=-2, dim2=-1)
        return self._divide_by_temperature_squared((p * (variances - pK)).sum(-1))

    def precision_change_along(
        self,
        y: Tensor,
        f: Tensor,
        before: Tensor,
        directions: Tensor,
        weights: Tensor | None = None,
        fisher: bool = False,
    ) -> Tensor:
        """Return the change of Σ_i w_i dΛdᵀ (m, r, r), with dΛdᵀ = (d diag(p) dᵀ − (dp)(dp)ᵀ)/T².

        The arguments are those of the protocol; y and `fisher` change nothing. With p̂ at `before`
        and Δp = p − p̂, the change of (dp)(dp)ᵀ is the symmetric part of (dΔp)(d(p + p̂))ᵀ, which
        does not cancel.
        """
        scaled = directions if weights is None else directions * weights[:, None, None]
        m, r = len(f), directions.shape[-1]
        p_before = self.mean(before)

        # Δp of the m outputs, and p̂ as the last entry: one product with d serves both.
        probabilities = torch.cat([self.mean(f) - p_before, p_before.unsqueeze(0)])
        projected = probabilities.movedim(0, 1) @ directions  # (b, m + 1, r)
        change = projected[:, :m]  # dΔp
        total = projected[:, :m] + 2 * projected[:, m:]  # d(p + p̂)
        change = change if weights is None else change * weights[:, None, None]
        outer = change.permute(1, 2, 0) @ total.movedim(0, 1)

        # Σ_c d_c Δp_c d_cᵀ as one product over all rows and classes.
        pairs = scaled.unsqueeze(-1) * directions.unsqueeze(-2)  # (b, C, r, r)
        diagonal_term = probabilities[:m].flatten(1) @ pairs.flatten(0, 1).flatten(1)
        outer_term = (outer + outer.mT) / 2
        return self._divide_by_temperature_squared(diagonal_term.reshape(m, r, r) - outer_term)

    def mean(self, f: Tensor) -> Tensor:
        """Return the probabilities p (..., C)."""
        return _softmax(self.logits(f))

    def variance(self, f: Tensor) -> Tensor:
        """Return the variances p(1 − p) (..., C) of the class indicators."""
        p = self.mean(f)
        return p * (1 - p)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n draws of the class, as integers (n, ...)."""
        p = self.mean(f)
        draws = torch.multinomial(
            p.reshape(-1, p.shape[-1]), n, replacement=True, generator=generator
        )
        return draws.mT.reshape(n, *f.shape[:-1])


def _softmax(f: Tensor) -> Tensor:
    """Return softmax over the last dimension of f (..., C), of the same shape and memory order."""
    # A component-major f (each component contiguous) is read in its own order, without a copy.
    if f.stride(-1) != 1:
        return torch.softmax(f.movedim(-1, 0), 0).movedim(0, -1)
    return torch.softmax(f, -1)
