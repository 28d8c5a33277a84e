"""The probabilities of classes as integrals: P(Y = c) = ∫ softmax_c(f) N(f; f̂, K) df, for any
number of classes.

One and two outputs are one-dimensional integrals of a sigmoid, exact to about 1e-8. More outputs
take S = 512 fixed nodes f = f̂ + R z (see `normal_nodes`), in the dtype of R: deterministic, with
mass one by construction. A row costs the product R z, S·C² multiplications (about 10·S·C for
Kronecker factors: see `many_classes`), and S·C exponentials. The same nodes give Var_f E[y|f] and
E_f H(y|f).

Mean KL error over random rows, f̂ ~ N(0, 3²), every output with variance v. C ≤ 100: K from a
Wishart law with a common part, truth by 2¹⁷ or more points. C = 1,000: the K of Kronecker factors,
2¹⁶ points.

    points   C = 3                  C = 10                 C = 100         C = 1,000
             v = 1  4      25       1      4      25       1      4        0.3    1      4
    128      3e-05  1e-04  4e-04   3e-05  7e-04  6e-03    2e-03  2e-02    6e-05  6e-04  1e-02
    256      4e-06  2e-05  8e-05   2e-05  4e-04  3e-03    6e-04  8e-03    4e-05  3e-04  8e-03
    512      4e-07  2e-06  1e-05   9e-06  2e-04  1e-03    3e-05  1e-03    1e-05  2e-04  5e-03
    1024     9e-08  4e-07  2e-06   3e-06  5e-05  5e-04    2e-05  8e-04    7e-06  8e-05  3e-03

Heads of 512 features with Kronecker factors (benchmarks/predict_scale.py --errors, 512 points
against 2¹⁵), mean over outputs of the variance, and mean KL: 10 classes 5: 1e-05, 28: 2e-03; 150
classes 1.5: 2e-05, 10: 7e-03, 49: 7e-02. Shared products and float32 change no probability by more
than 1e-07.

Other sets of nodes (lattices, Halton, radial) and other roots of K (eigenvectors, symmetric) differ
by less than a factor of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.maths.quadrature.logistic import expected_entropy, logistic_normal, normal_line
from ssla.maths.quadrature.normal import normal_nodes
from ssla.maths.roots import Root, ScaledRoot, full_root
from ssla.predictive.many_classes import LOWEST, TINY, SoftmaxIntegrals

POINTS = 512
MANY, MANY_FULL = (
    32,
    100,
)  # classes from which slabs of nodes are faster: with one basis for all rows, and with full roots
ENTRIES_AT_ONCE = 1 << 18  # of an array (rows, C, S): what fits a processor's cache
COPIES = 4  # of such an array, at most


class ClassIntegrals(NamedTuple):
    """Normalised log probabilities (N, C), Var_f E[y|f] of the class indicators (N, C), and E_f
    H(y|f) in nats (N,).

    H is the entropy of the classes at one f; the mutual information of y and f is the entropy of
    the probabilities less E_f H.
    """

    log_probs: Tensor
    spread: Tensor
    entropy: Tensor

    @property
    def mutual_information(self) -> Tensor:
        """I(y; f) (N,): H(E p) − E H(p), not negative."""
        return (entropy_of(self.log_probs) - self.entropy).clamp_min(0)


def entropy_of(log_probs: Tensor) -> Tensor:
    """−Σ p log p in nats, in float64.  (N, C) -> (N,)."""
    found = [
        _entropy(block.double())
        for block in log_probs.split(max(ENTRIES_AT_ONCE // max(log_probs.shape[1], 1), 1))
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _entropy(log_probs: Tensor) -> Tensor:
    # p log p is 0 where p is, also where log p is −∞
    return -(log_probs.exp() * log_probs.clamp_min(LOWEST)).sum(1)


def integrate_classes(
    parts: Iterable[tuple[Tensor, Root]],
    outputs: int,
    budget: int,
    rows: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> ClassIntegrals:
    """parts: f̂ (B, C) in float64 and a root of K, a chunk at a time.

    budget: bytes of intermediate results.

    rows: of all parts together, if known: the answers (in the dtype) are then never held twice.
    """
    integrate = _integrator(outputs, budget, rows)
    found = (integrate(f, root) for f, root in parts)
    if rows is None:
        return _joined(list(found), outputs)
    classes = max(outputs, 2)
    whole = ClassIntegrals(
        torch.empty(rows, classes, dtype=dtype),
        torch.empty(rows, classes, dtype=dtype),
        torch.empty(rows, dtype=torch.float64),
    )
    start = 0
    for part in found:
        block = slice(start, start + len(part.entropy))
        for column, values in zip(whole, part, strict=True):
            column[block] = values
        start = block.stop
    assert start == rows
    return whole


def integrate_with_graph(parts: Iterable[tuple[Tensor, Root]], outputs: int) -> ClassIntegrals:
    """`integrate_classes` with the autograd graph of f̂ and the roots: the same nodes.

    All arrays (rows, C, S) are held.
    """
    return _joined(
        [_binary(f, root) if outputs <= 2 else _softmax_with_graph(f, root) for f, root in parts],
        outputs,
    )


def _joined(parts: list[ClassIntegrals], outputs: int) -> ClassIntegrals:
    none = torch.empty(0, max(outputs, 2), dtype=torch.float64)
    return ClassIntegrals(
        *map(torch.cat, zip(*(parts or [ClassIntegrals(none, none, none[:, 0])]), strict=True))
    )


def _integrator(
    outputs: int, budget: int, rows: int | None
) -> Callable[[Tensor, Root], ClassIntegrals]:
    """The integrals of a chunk from f̂ and a root of K."""
    if outputs <= 2:
        return _binary
    half = softmax_nodes(outputs).mT[: POINTS // 2].contiguous()
    many = SoftmaxIntegrals(half, budget, whitened(outputs), rows)

    def integrate(f: Tensor, root: Root) -> ClassIntegrals:
        if outputs < (MANY if isinstance(root, ScaledRoot) else MANY_FULL):
            return _softmax(f, root, budget)
        log_probs, spread, entropy = many(f, root)
        return ClassIntegrals(torch.log_softmax(log_probs, 1), spread, entropy)

    return integrate


def _softmax_with_graph(f: Tensor, root: Root) -> ClassIntegrals:
    z = softmax_nodes(f.shape[1]).to(root.dtype)
    logs = torch.log_softmax(f.unsqueeze(-1) + deviations(root, z).double(), 1)  # (B, C, S)
    p = logs.exp()
    entropy = -(p * logs.clamp_min(LOWEST)).sum(1).mean(-1)
    return ClassIntegrals(
        torch.log_softmax(logs.logsumexp(-1), 1), p.var(-1, correction=0), entropy
    )


def _binary(f: Tensor, root: Root) -> ClassIntegrals:
    """Of one logit, or of the difference of two."""
    size = f.shape[1]
    R = root.times(torch.eye(size, dtype=root.dtype)).double()
    m, r = (f[:, 0], R[:, 0]) if size == 1 else (f[:, 1] - f[:, 0], R[:, 1] - R[:, 0])
    sd = torch.linalg.vector_norm(r, dim=1)
    log_one, log_zero, spread = logistic_normal(m, sd)
    log_probs = torch.log_softmax(torch.stack([log_zero, log_one], 1), 1)
    return ClassIntegrals(log_probs, torch.stack([spread, spread], 1), expected_entropy(m, sd))


def _softmax(f: Tensor, root: Root, budget: int) -> ClassIntegrals:
    """In blocks of rows, so that no more than a share of the budget is taken (but at least one
    row at a time).
    """
    size = f.shape[1]
    z = softmax_nodes(size).to(root.dtype)
    entries = min(ENTRIES_AT_ONCE, budget // (COPIES * root.dtype.itemsize))
    rows = max(entries // z.numel(), 1)
    blocks = [slice(start, start + rows) for start in range(0, len(f), rows)]
    found = ClassIntegrals(torch.empty_like(f), torch.empty_like(f), torch.empty_like(f[:, 0]))
    for block in blocks:
        for whole, part in zip(found, _block(f[block], root.take(block), z), strict=True):
            whole[block] = part
    return found


def softmax_nodes(size: int) -> Tensor:
    """(C, S): S/2 points, and then their mirror images."""
    return normal_nodes(size, POINTS // 2)[0].mT.contiguous()


def whitened(size: int) -> bool:
    """Whether the nodes have unit variance in every direction.

    Otherwise `deviations` rescales them for each output.
    """
    return 4 * size <= POINTS


def _block(f: Tensor, root: Root, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, C), R and nodes (C, S) -> log probabilities and spread (B, C), mean entropy (B,)."""
    top = f - f.amax(1, keepdim=True)
    logits = deviations(root, z).add_(top.to(z.dtype).unsqueeze(-1))  # (B, C, S)
    logits.sub_(logits.amax(1, keepdim=True))
    p = logits.exp()
    sums = p.sum(1, keepdim=True)
    p.mul_(sums.reciprocal())
    # H(p) = log Σ exp(logits) − Σ p logits at each node
    entropy = (
        sums.log_().sum((1, 2)) - logits.clamp_min_(LOWEST).mul_(p).sum((1, 2))
    ).double() / z.shape[1]
    mean = p.mean(-1)
    spread = torch.linalg.vector_norm(p.sub_(mean.unsqueeze(-1)), dim=-1).double() ** 2 / z.shape[1]
    log_probs = mean.double().log()
    tiny = (mean < TINY[z.dtype]).any(1).nonzero().squeeze(-1).tolist()
    for row in tiny:
        one = slice(row, row + 1)
        logits = deviations(root.take(one), z).double().add_(top[one].unsqueeze(-1))
        log_probs[one] = torch.log_softmax(logits, 1).logsumexp(-1)
    return torch.log_softmax(log_probs, 1), spread, entropy


def deviations(root: Root, z: Tensor) -> Tensor:
    """R z (B, C, S).

    Each output has its own variance exactly: of many outputs, the nodes have it only in the mean.
    """
    moved = root.times(z)
    if not whitened(z.shape[0]):
        seen = torch.linalg.vecdot(moved, moved) / z.shape[1]
        factor = torch.where(seen > 0, root.variances() / seen, 1.0).sqrt()
        return (
            moved * factor.unsqueeze(-1)
            if moved.requires_grad
            else moved.mul_(factor.unsqueeze(-1))
        )
    return moved


def at_temperature_one(
    likelihood: Likelihood, parts: Iterable[tuple[Tensor, Root]]
) -> Iterator[tuple[Tensor, Root]]:
    """f̂ and a root of K in units of the temperature, in which the integrals are those of
    temperature 1.
    """
    temperature = likelihood.logit_temperature
    assert temperature is not None
    for f, root in parts:
        yield (f, root) if temperature == 1 else (f / temperature, root.scaled(1 / temperature))


def class_slopes(f: Tensor, K: Tensor, df: Tensor, dK: Tensor) -> Tensor:
    """d log P(Y = c) when f̂ moves by df and K by dK.

    (N, C), (N, C, C) -> (N, C); one output has two classes.

    By Bonnet's and Price's theorems dE p_c = E[∇p_c]ᵀdf + ½ tr(E[∇²p_c] dK), over the nodes of the
    integrals.
    """
    if f.shape[1] <= 2:  # one logit, that of the second class
        a = (
            torch.ones(1, dtype=f.dtype)
            if f.shape[1] == 1
            else torch.tensor([-1.0, 1.0], dtype=f.dtype)
        )
        only = torch.tensor([0.0, 1.0], dtype=f.dtype)
        f, df = (torch.outer(part @ a, only) for part in (f, df))
        K, dK = ((part @ a @ a)[:, None, None] * torch.outer(only, only) for part in (K, dK))
        line, weights = normal_line()
        z = torch.stack([torch.zeros_like(line), line])
    else:
        z = softmax_nodes(f.shape[1])
        weights = torch.full_like(z[0], 1 / z.shape[1])
    root, rows = full_root(K), max(ENTRIES_AT_ONCE // z.numel(), 1)
    slopes = torch.empty_like(f)
    for block in (slice(start, start + rows) for start in range(0, len(f), rows)):
        p = torch.softmax(
            f[block].unsqueeze(-1) + deviations(root.take(block), z), 1
        ).mT  # (B, S, C)
        turned, diagonal = p @ dK[block], dK[block].diagonal(dim1=1, dim2=2)
        whole = (turned * p).sum(-1, keepdim=True)
        first = df[block].unsqueeze(1) - p @ df[block].unsqueeze(-1)
        second = diagonal.unsqueeze(1) - 2 * turned + 2 * whole - p @ diagonal.unsqueeze(-1)
        slopes[block] = (weights @ (p * (first + 0.5 * second))) / (weights @ p)
    return slopes
