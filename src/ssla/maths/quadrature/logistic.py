"""E σ(f) and E σ(f)σ(−f) for f ~ N(m, s²), to about 1e-8 for every m and s.

The trapezoidal rule is exponentially accurate for both forms of the same integral. A small s takes
nodes of the normal variable,

    E σ(f) = ∫ σ(m + s z) φ(z) dz,                 error e^(−2π²/(s h)),

a large s those of a logistic variable L, because σ(f) = P(L ≤ f):

    E σ(f) = ∫ Φ((m − l)/s) σ(l)σ(−l) dl,          error e^(−2π²/h).

Sums are taken in logarithms, and the tail of L beyond the last node is added in closed form:
logarithms of probabilities below 1e-17 are right to 0.03.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LARGE = 4.0  # s from which the logistic nodes are used: both rules are then right to 1e-8
# Distance of the last node from zero, and distance of two nodes; the errors are in the docstring
NORMAL_REACH, NORMAL_STEP = 12.0, 0.25
LOGISTIC_REACH, LOGISTIC_STEP = 40.0, 0.8
FAR = 100.0  # standard deviations from which Φ is taken from its asymptotic series. A guess


class LogisticNormal(NamedTuple):
    """Expectations of σ(f) under f ~ N(m, s²), all (N,)."""

    log_one: Tensor  # log E σ(f)
    log_zero: Tensor  # log E σ(−f)
    spread: Tensor  # Var σ(f)


def logistic_normal(
    mean: Tensor, sd: Tensor, log_ndtr: Callable[[Tensor], Tensor] = torch.special.log_ndtr
) -> LogisticNormal:
    """Compute the expectations of σ(f) for f ~ N(mean, sd²); mean, sd ≥ 0 (N,), in float64.

    log_ndtr: log Φ, elementwise; another implementation where torch's own cannot be exported.
    """
    # Both rules are computed for all rows, each with an s that it can take.
    small = _integrate_by_normal(mean, sd.clamp_max(LARGE))
    large = _integrate_by_logistic(mean, sd.clamp_min(LARGE), log_ndtr)
    return LogisticNormal(
        *(torch.where(sd <= LARGE, a, b) for a, b in zip(small, large, strict=True))
    )


def expected_entropy(mean: Tensor, sd: Tensor) -> Tensor:
    """Compute E h(σ(f)) in nats for f ~ N(mean, sd²).  (N,), (N,) -> (N,).

    h(p) = −p log p − (1−p) log(1−p) is the entropy of two classes. The nodes are those of the
    normal variable for small sd, and of f itself for large ones: ∫ h(σ(l)) φ((l − m)/s) dl/s.
    Beyond the last node h is below 1e-15.
    """
    z, weights = normal_trapezoidal_rule()
    by_normal = (
        _compute_entropy_of_logit(mean.unsqueeze(1) + sd.clamp_max(LARGE).unsqueeze(1) * z)
        @ weights
    )
    L = _space_nodes(LOGISTIC_REACH, LOGISTIC_STEP)
    large_sd = sd.clamp_min(LARGE)
    scores = (L - mean.unsqueeze(1)) / large_sd.unsqueeze(1)
    by_logit = (-0.5 * scores * scores).exp() @ _compute_entropy_of_logit(L)
    return torch.where(
        sd <= LARGE, by_normal, by_logit * LOGISTIC_STEP / (large_sd * math.sqrt(2 * math.pi))
    )


def _compute_entropy_of_logit(f: Tensor) -> Tensor:
    """Compute the entropy h(σ(f)) in nats, elementwise, without cancellation for large |f|."""
    return -torch.sigmoid(f) * logsigmoid(f) - torch.sigmoid(-f) * logsigmoid(-f)


def normal_trapezoidal_rule() -> tuple[Tensor, Tensor]:
    """Return nodes z and weights, each (J,), of the trapezoidal rule for E h(Z), Z ~ N(0, 1)."""
    z = _space_nodes(NORMAL_REACH, NORMAL_STEP)
    return z, torch.softmax(-0.5 * z * z, 0)


def _integrate_by_normal(m: Tensor, s: Tensor) -> LogisticNormal:
    """Compute the expectations by nodes of the normal variable, for s ≤ LARGE.  m, s (N,)."""
    z, weights = normal_trapezoidal_rule()
    log_weights = weights.log()
    f = m.unsqueeze(1) + s.unsqueeze(1) * z
    log_one = (log_weights + logsigmoid(f)).logsumexp(1)
    log_zero = (log_weights + logsigmoid(-f)).logsumexp(1)
    spread = (torch.sigmoid(f) - log_one.exp().unsqueeze(1)).square() @ weights
    return LogisticNormal(log_one, log_zero, spread)


def _integrate_by_logistic(
    m: Tensor, s: Tensor, log_ndtr: Callable[[Tensor], Tensor]
) -> LogisticNormal:
    """Compute the expectations by nodes of a logistic variable, for s ≥ LARGE.  m, s (N,)."""
    L = _space_nodes(LOGISTIC_REACH, LOGISTIC_STEP)
    log_weights = torch.log_softmax(logsigmoid(L) + logsigmoid(-L), 0)
    z = (m.unsqueeze(1) - L) / s.unsqueeze(1)
    log_one, log_zero = (
        torch.logaddexp(
            (log_weights + log_ndtr(sign * z)).logsumexp(1), _log_tail(sign * m, s, log_ndtr)
        )
        for sign in (1, -1)
    )

    # Var σ = E σ · E(1 − σ) − E[σ(1 − σ)], and the last term is dE σ/dm.
    slope = (-0.5 * z * z).exp() @ log_weights.exp() / (s * math.sqrt(2 * math.pi))
    spread = ((log_one + log_zero).exp() - slope).clamp_min(0)
    return LogisticNormal(log_one, log_zero, spread)


def _log_tail(m: Tensor, s: Tensor, log_ndtr: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute log ∫ e^l Φ((m − l)/s) dl over l < end = −LOGISTIC_REACH.  m, s (N,) -> (N,).

    The logistic density is e^l there. By parts the integral is e^end Φ((m − end)/s) + e^(m + s²/2)
    Φ(t), with t = a − s and a = (end − m)/s. For t < −FAR the logarithm of the second term is a
    difference of numbers of size s², of which only rounding errors are left. There the same term is
    computed as e^(end − a²/2) Φ(t) / (√2π φ(t)). log_ndtr: log Φ, elementwise.
    """
    end = -LOGISTIC_REACH
    ends = end + log_ndtr((m - end) / s)
    a = (end - m) / s
    t = a - s
    far = t < -FAR

    # Where one form is used, the other gets an argument that keeps it finite.
    near = torch.where(far, torch.zeros_like(m), m + s * s / 2) + log_ndtr(
        torch.where(far, torch.zeros_like(t), t)
    )
    mills = end - a * a / 2 + _log_mills(torch.where(far, t, torch.full_like(t, -FAR)))
    return torch.logaddexp(ends, torch.where(far, mills, near))


def _log_mills(t: Tensor) -> Tensor:
    """Compute log [Φ(t) / (√2π φ(t))] for t ≤ −FAR, elementwise.

    Φ(t)/φ(t) is −(1 − 1/t² + 3/t⁴ − …)/t, an asymptotic series whose relative error is 15/t⁶ here.
    """
    inverse = 1 / (t * t)
    return -torch.log(-t) - 0.5 * math.log(2 * math.pi) + torch.log1p(inverse * (3 * inverse - 1))


def _space_nodes(reach: float, step: float) -> Tensor:
    """Return equally spaced nodes (J,) from −reach to reach."""
    return torch.linspace(-reach, reach, round(2 * reach / step) + 1, dtype=torch.float64)
