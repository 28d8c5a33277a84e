"""Classes: Bernoulli on one logit, Categorical on C logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ssla._checks import batched, in_plain_torch, positive
from ssla.likelihoods.likelihood import (
    CLOSE,
    SIGMOID,
    SOFTMAX,
    Likelihood,
    common_shape,
    event,
    need_outputs,
    softplus_difference,
)
from ssla.likelihoods.support import Classes, Support
from ssla.maths.quadrature.logistic import logistic_normal


@dataclass(frozen=True, repr=False)
class _Classes(Likelihood):
    """What likelihoods of classes share: the outputs are logits times a temperature T.

    T > 1 says that the network is over-confident, T < 1 that it is too timid.
    """

    temperature: float = 1.0

    @in_plain_torch
    def __post_init__(self) -> None:
        positive(f"{type(self).__name__} temperature", torch.tensor(float(self.temperature)))

    def logits(self, f: Tensor) -> Tensor:
        """The outputs at temperature 1: f/T."""
        return f if self.temperature == 1 else f / self.temperature

    @property
    def logit_temperature(self) -> float:
        return self.temperature

    concave = True
    links = (SIGMOID, SOFTMAX)

    def dispersion_in_words(self, factor: float) -> str:
        if factor > CLOSE:
            return f"the network is over-confident: its logits are {factor:.2g} times too large"
        if factor < 1 / CLOSE:
            return (
                f"the network is under-confident: its logits should be {1 / factor:.2g} times as "
                "large"
            )
        return "the network's confidence is right: no other temperature is clearly better"

    def __repr__(self) -> str:
        temperature = "" if self.temperature == 1 else f"temperature={self.temperature:.4g}"
        return f"{type(self).__name__}({temperature})"


@dataclass(frozen=True, repr=False)
class Bernoulli(_Classes):
    """y ∈ {0, 1}, one output f = T · logit P(y = 1).

    With p = σ(f/T) and temperature T: g = (y − p)/T, Λ = p(1−p)/T² (= fisher).
    """

    @property
    def support(self) -> Support:
        return Classes(2)

    one_probability = True
    closed_form = True

    def dispersed(self, factor: float) -> Bernoulli:
        """At that many times the temperature."""
        return replace(self, temperature=self.temperature * factor)

    def log_average(self, y: Tensor, f: Tensor, K: Tensor) -> Tensor:
        """log ∫ σ(±f/T) N(f; f̂, K) df, to about 1e-8."""
        sd = K[:, 0, 0].clamp_min(0).sqrt() / self.temperature
        found = logistic_normal(self.logits(f)[:, 0], sd)
        return torch.where(event(y, f) > 0, found.log_one, found.log_zero)

    def support_for(self, outputs: int) -> Support:
        need_outputs(
            "Bernoulli", outputs, 1, "the logit of y = 1; for several classes use Categorical"
        )
        return Classes(2)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        y, a = event(y, f).to(f.dtype), self.logits(f)[..., 0]
        return logsigmoid((2 * y - 1) * a)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        sign = 2 * event(y, f_new).to(f_new.dtype) - 1
        return -softplus_difference(
            -sign * self.logits(f_old)[..., 0], -sign * self.logits(f_new - f_old)[..., 0]
        )

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        sign = 2 * event(y, f).to(f.dtype) - 1
        slope = sign * torch.sigmoid(-sign * self.logits(f)[..., 0])
        return self.logits(slope.unsqueeze(-1))

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        value = self.fisher(f)[..., 0, 0]
        return value.expand(common_shape(event(y, f), value))[..., None, None]

    def fisher(self, f: Tensor) -> Tensor:
        a = self.logits(f)
        return self.logits(self.logits(torch.sigmoid(a) * torch.sigmoid(-a))).unsqueeze(-1)

    def mean(self, f: Tensor) -> Tensor:
        return torch.sigmoid(self.logits(f)[..., 0])

    def variance(self, f: Tensor) -> Tensor:
        a = self.logits(f)[..., 0]
        return torch.sigmoid(a) * torch.sigmoid(-a)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        p = self.mean(f)
        return torch.bernoulli(p.expand(n, *p.shape), generator=generator).long()


@dataclass(frozen=True, repr=False)
class Categorical(_Classes):
    """y ∈ {0 … C−1}, C ≥ 2 outputs f = T · logits.

    With p = softmax(f/T) and temperature T: g = (e_y − p)/T, Λ = (diag(p) − ppᵀ)/T² (= fisher).
    """

    @property
    def support(self) -> Support:
        return Classes(2)

    softmax = True
    shift_invariant = True

    def dispersed(self, factor: float) -> Categorical:
        """At that many times the temperature."""
        return replace(self, temperature=self.temperature * factor)

    def support_for(self, outputs: int) -> Support:
        if outputs < 2:
            raise ValueError(
                "Categorical needs a network with one logit for each class, at least two, but this "
                "one has one output. For one logit use Bernoulli()."
            )
        return Classes(outputs)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        logs = torch.log_softmax(self.logits(f), -1)
        y = y.long()
        shape = common_shape(y, f[..., 0])
        return logs.expand(*shape, -1).gather(-1, y.expand(shape).unsqueeze(-1)).squeeze(-1)

    def log_prob_at_nodes(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y|f) (B, J) at f (B, C, J), in place: of each node only the sum of its
        exponentials is needed.
        """
        f -= f.amax(1, keepdim=True)
        f /= self.temperature
        own = f.gather(1, y.long()[:, None, None].expand(-1, 1, f.shape[2])).squeeze(1)
        return own - f.exp_().sum(1).log()

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """−log1p Σ_c p_c expm1(Δ_c − Δ_y), p at f_old; the plain difference where a Δ_c − Δ_y
        exceeds one.
        """
        y = y.long()
        shape = common_shape(y, f_new[..., 0], f_old[..., 0])
        d = self.logits(f_new - f_old).expand(*shape, -1)
        d = d - d.gather(-1, y.expand(shape).unsqueeze(-1))
        close = -torch.log1p(
            (torch.softmax(self.logits(f_old), -1) * torch.expm1(d.clamp(-1, 1))).sum(-1)
        )
        far = d.abs().amax(-1) > 1
        if batched(far):  # inside torch.func.vmap no step may depend on values
            return torch.where(far, self.log_prob(y, f_new) - self.log_prob(y, f_old), close)
        some = y.expand(shape)[far]
        new, old = (f.expand(*shape, -1)[far] for f in (f_new, f_old))
        return close.masked_scatter(far, self.log_prob(some, new) - self.log_prob(some, old))

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        # column y as Σ_{c≠y} p_c: 1 − p_y would cancel for p_y near 1
        hit = torch.nn.functional.one_hot(y.long(), f.shape[-1]).to(f.dtype)
        others = _softmax(self.logits(f)) * (1 - hit)
        return self.logits(hit * others.sum(-1, keepdim=True) - others)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        shape = common_shape(y, f[..., 0])
        return self.fisher(f).expand(*shape, -1, -1)

    def fisher(self, f: Tensor) -> Tensor:
        p = _softmax(self.logits(f))
        if f.stride(-1) == 1:
            outer = -p.unsqueeze(-1) * p.unsqueeze(-2)
        else:  # component-major as f: products over many rows read it fastest
            p = p.movedim(-1, 0)
            outer = (-p.unsqueeze(0) * p.unsqueeze(1)).movedim((0, 1), (-2, -1))
        diagonal = outer.diagonal(dim1=-2, dim2=-1)
        others = -(outer.sum(-1) - diagonal)
        diagonal.copy_(others)  # rows sum to zero exactly
        return self.logits(self.logits(outer))

    # Products with Λ = (diag(p) − ppᵀ)/T², without a C×C matrix for each row. It is the same for
    # every y, and its expectation is itself.

    def score_change(self, y: Tensor, f: Tensor, before: Tensor) -> Tensor:
        """(p̂ − p)/T: y cancels."""
        return self.logits((self.mean(f) - self.mean(before)).neg_())

    def precision_times(self, y: Tensor, f: Tensor, v: Tensor, fisher: bool = False) -> Tensor:
        """(p∘v − p(pᵀv))/T²."""
        p = self.mean(f)
        along = p * v
        return self.logits(self.logits(along - p * along.sum(-1, keepdim=True)))

    def precision_diagonal(self, y: Tensor, f: Tensor, fisher: bool = False) -> Tensor:
        p = self.mean(f)
        return self.logits(self.logits(p - p * p))

    def precision_trace(self, y: Tensor, f: Tensor, K: Tensor, fisher: bool = False) -> Tensor:
        p = self.mean(f)
        through = (p.movedim(0, 1) @ K).movedim(1, 0)
        variances = K.diagonal(dim1=-2, dim2=-1)
        return self.logits(self.logits((p * (variances - through)).sum(-1)))

    def precision_change_along(
        self,
        y: Tensor,
        f: Tensor,
        before: Tensor,
        directions: Tensor,
        weights: Tensor | None = None,
        fisher: bool = False,
    ) -> Tensor:
        """dΛdᵀ = (d diag(p) dᵀ − (dp)(dp)ᵀ)/T². With p̂ before, the change of the last term is the
        symmetric part of (dΔp)(d(p + p̂))ᵀ: nothing cancels.
        """
        scaled = directions if weights is None else directions * weights[:, None, None]
        m, r = len(f), directions.shape[-1]
        old = self.mean(before)
        probabilities = torch.cat([self.mean(f) - old, old.unsqueeze(0)])  # Δp, and p̂
        along = probabilities.movedim(0, 1) @ directions  # (b, m + 1, r)
        change, total = along[:, :m], along[:, :m] + 2 * along[:, m:]
        change = change if weights is None else change * weights[:, None, None]
        crossed = change.permute(1, 2, 0) @ total.movedim(0, 1)
        pairs = scaled.unsqueeze(-1) * directions.unsqueeze(-2)  # (b, C, r, r)
        spread = probabilities[:m].flatten(1) @ pairs.flatten(0, 1).flatten(1)
        inside = spread.reshape(m, r, r) - (crossed + crossed.mT) / 2
        return self.logits(self.logits(inside))

    def mean(self, f: Tensor) -> Tensor:
        return _softmax(self.logits(f))

    def variance(self, f: Tensor) -> Tensor:
        p = self.mean(f)
        return p * (1 - p)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        p = self.mean(f)
        draws = torch.multinomial(
            p.reshape(-1, p.shape[-1]), n, replacement=True, generator=generator
        )
        return draws.mT.reshape(n, *f.shape[:-1])


def _softmax(f: Tensor) -> Tensor:
    """Over the last dimension, without a copy where f is stored component-major."""
    return (
        torch.softmax(f.movedim(-1, 0), 0).movedim(0, -1)
        if f.stride(-1) != 1
        else torch.softmax(f, -1)
    )
