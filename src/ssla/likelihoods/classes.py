"""Classes: Bernoulli on one logit, Categorical on C logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ssla.likelihoods.likelihood import Derivatives, Likelihood, common_shape, event, need_outputs, softplus_difference
from ssla.likelihoods.support import Classes, Support


@dataclass(frozen=True)
class Bernoulli:
    """y ∈ {0, 1}, one output f = logit P(y = 1).  With p = σ(f): g = y − p, Λ = p(1−p) (= fisher)."""

    @property
    def support(self) -> Support:
        return Classes(2)

    @property
    def predictive(self) -> Likelihood:
        return self

    linear_domain = True

    def support_for(self, outputs: int) -> Support:
        need_outputs("Bernoulli", outputs, 1, "the logit of y = 1; for several classes use Categorical")
        return Classes(2)

    def check_outputs(self, f: Tensor) -> None:
        """Every f is allowed."""

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        y, a = event(y, f).to(f.dtype), f[..., 0]
        return logsigmoid((2 * y - 1) * a)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        sign = 2 * event(y, f_new).to(f_new.dtype) - 1
        return -softplus_difference(-sign * f_old[..., 0], -sign * (f_new - f_old)[..., 0])

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        sign = 2 * event(y, f).to(f.dtype) - 1
        return (sign * torch.sigmoid(-sign * f[..., 0])).unsqueeze(-1)

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        y, a = event(y, f), f[..., 0]
        value = torch.sigmoid(a) * torch.sigmoid(-a)
        return value.expand(common_shape(y, a))[..., None, None]

    def fisher(self, f: Tensor) -> Tensor:
        return (torch.sigmoid(f) * torch.sigmoid(-f)).unsqueeze(-1)

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        return Derivatives(self.log_prob(y, f), self.score(y, f), self.precision(y, f))

    def mean(self, f: Tensor) -> Tensor:
        return torch.sigmoid(f[..., 0])

    def variance(self, f: Tensor) -> Tensor:
        return torch.sigmoid(f[..., 0]) * torch.sigmoid(-f[..., 0])

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        p = self.mean(f)
        return torch.bernoulli(p.expand(n, *p.shape), generator=generator).long()


@dataclass(frozen=True)
class Categorical:
    """y ∈ {0 … C−1}, C ≥ 2 outputs f = logits.  With p = softmax(f): g = e_y − p, Λ = diag(p) − ppᵀ (= fisher)."""

    @property
    def support(self) -> Support:
        return Classes(2)

    @property
    def predictive(self) -> Likelihood:
        return self

    linear_domain = True

    def support_for(self, outputs: int) -> Support:
        if outputs < 2:
            raise ValueError(
                "Categorical needs a network with one logit for each class, at least two, but this one has one output. "
                "For one logit use Bernoulli()."
            )
        return Classes(outputs)

    def check_outputs(self, f: Tensor) -> None:
        """Every f is allowed."""

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        logs = torch.log_softmax(f, -1)
        y = y.long()
        shape = common_shape(y, f[..., 0])
        return logs.expand(*shape, -1).gather(-1, y.expand(shape).unsqueeze(-1)).squeeze(-1)

    def log_prob_difference(self, y: Tensor, f_new: Tensor, f_old: Tensor) -> Tensor:
        """−log1p Σ_c p_c expm1(Δ_c − Δ_y), p at f_old; the plain difference where a Δ_c − Δ_y exceeds one."""
        y = y.long()
        shape = common_shape(y, f_new[..., 0], f_old[..., 0])
        d = (f_new - f_old).expand(*shape, -1)
        d = d - d.gather(-1, y.expand(shape).unsqueeze(-1))
        close = -torch.log1p((torch.softmax(f_old, -1) * torch.expm1(d.clamp(-1, 1))).sum(-1))
        return torch.where(d.abs().amax(-1) <= 1, close, self.log_prob(y, f_new) - self.log_prob(y, f_old))

    def score(self, y: Tensor, f: Tensor) -> Tensor:
        # column y as Σ_{c≠y} p_c: 1 − p_y would cancel for p_y near 1
        hit = torch.nn.functional.one_hot(y.long(), f.shape[-1]).to(f.dtype)
        others = _softmax(f) * (1 - hit)
        return hit * others.sum(-1, keepdim=True) - others

    def precision(self, y: Tensor, f: Tensor) -> Tensor:
        shape = common_shape(y, f[..., 0])
        return self.fisher(f).expand(*shape, -1, -1)

    def fisher(self, f: Tensor) -> Tensor:
        p = _softmax(f)
        if f.stride(-1) == 1:
            outer = -p.unsqueeze(-1) * p.unsqueeze(-2)
        else:  # component-major as f: products over many rows read it fastest
            p = p.movedim(-1, 0)
            outer = (-p.unsqueeze(0) * p.unsqueeze(1)).movedim((0, 1), (-2, -1))
        diagonal = outer.diagonal(dim1=-2, dim2=-1)
        others = -(outer.sum(-1) - diagonal)
        diagonal.copy_(others)  # rows sum to zero exactly
        return outer

    def derivatives(self, y: Tensor, f: Tensor) -> Derivatives:
        return Derivatives(self.log_prob(y, f), self.score(y, f), self.precision(y, f))

    def mean(self, f: Tensor) -> Tensor:
        return _softmax(f)

    def variance(self, f: Tensor) -> Tensor:
        p = torch.softmax(f, -1)
        return p * (1 - p)

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        p = torch.softmax(f, -1)
        draws = torch.multinomial(p.reshape(-1, p.shape[-1]), n, replacement=True, generator=generator)
        return draws.mT.reshape(n, *f.shape[:-1])


def _softmax(f: Tensor) -> Tensor:
    """Over the last dimension, without a copy where f is stored component-major."""
    return torch.softmax(f.movedim(-1, 0), 0).movedim(0, -1) if f.stride(-1) != 1 else torch.softmax(f, -1)
