"""The probabilities of classes as integrals, for any number of classes.

P(Y = c) = ∫ softmax_c(f) N(f; f̂, K) df. One and two outputs are one-dimensional integrals of a
sigmoid, exact to about 1e-8. More outputs take S = 512 fixed nodes f = f̂ + R z (see
`normal_nodes`), in the dtype of R: deterministic, with mass one by construction. A row costs the
product R z, S·C² multiplications (about 10·S·C for Kronecker factors: see `many_classes`), and S·C
exponentials. The same nodes give Var_f E[y|f] and E_f H(y|f).

Mean KL error over random rows, f̂ ~ N(0, 3²), every output with variance v. C ≤ 100: K from a
Wishart law with a common part, truth by 2¹⁷ or more points. C = 1,000: the K of Kronecker factors,
2¹⁶ points.

    points   C = 3                  C = 10                 C = 100         C = 1,000
             v = 1  4      25       1      4      25       1      4        0.3    1      4
    128      3e-05  1e-04  4e-04   3e-05  7e-04  6e-03    2e-03  2e-02    6e-05  6e-04  1e-02
    256      4e-06  2e-05  8e-05   2e-05  4e-04  3e-03    6e-04  8e-03    4e-05  3e-04  8e-03
    512      4e-07  2e-06  1e-05   9e-06  2e-04  1e-03    3e-05  1e-03    1e-05  2e-04  5e-03
    1024     9e-08  4e-07  2e-06   3e-06  5e-05  5e-04    2e-05  8e-04    7e-06  8e-05  3e-03

Heads of 512 features with Kronecker factors (benchmarks/speed/predict_scale.py --errors, 512 points
against 2¹⁵), mean over outputs of the variance, and mean KL: 10 classes 5: 1e-05, 28: 2e-03; 150
classes 1.5: 2e-05, 10: 7e-03, 49: 7e-02. Shared products and float32 change no probability by more
than 1e-07.

Other sets of nodes (lattices, Halton, radial) and other roots of K (eigenvectors, symmetric) differ
by less than a factor of two.

B rows of a chunk, C classes, S nodes. A root of K is R with K = R Rᵀ; root.multiply(z) is R z. p
are the class probabilities at a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ssla.likelihoods import Likelihood
from ssla.maths.quadrature.logistic import (
    expected_entropy,
    logistic_normal,
    normal_trapezoidal_rule,
)
from ssla.maths.quadrature.normal import normal_nodes
from ssla.maths.roots import Root, ScaledRoot, full_root
from ssla.predictive.many_classes import LOWEST, TINY, SoftmaxIntegrals

POINTS = 512  # nodes: see the table above
# Numbers of classes from which slabs of nodes are faster, by benchmarks/speed/predict_scale.py:
MANY = 32  # where the roots of all rows have one basis
MANY_FULL = 100  # where they are full matrices
ENTRIES_AT_ONCE = 1 << 18  # of an array (rows, C, S): what fits a processor's cache
COPIES = 4  # of such an array, at most


class ClassIntegrals(NamedTuple):
    """The integrals of N rows and C classes over f ~ N(f̂, K).

    H(y|f) is the entropy of the classes at one f. The mutual information of y and f is the entropy
    of the probabilities less E_f H(y|f).
    """

    log_probs: Tensor  # normalised log probabilities (N, C)
    spread: Tensor  # Var_f E[y|f] of the class indicators (N, C)
    entropy: Tensor  # E_f H(y|f) in nats (N,)

    @property
    def mutual_information(self) -> Tensor:
        """Return I(y; f) = H(E p) − E H(p) in nats (N,), at least zero."""
        return (compute_entropy(self.log_probs) - self.entropy).clamp_min(0)


def compute_entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy −Σ p log p (N,) in nats, in float64, for log_probs (N, C).

    Rows are read in blocks, so that no float64 copy of all of them is held.
    """
    entropies = []
    for block in log_probs.split(max(ENTRIES_AT_ONCE // max(log_probs.shape[1], 1), 1)):
        logs = block.double()
        # p log p is 0 where p is 0. The clamp keeps 0 · (−∞), which is NaN, away.
        entropies.append(-(logs.exp() * logs.clamp_min(LOWEST)).sum(1))
    return torch.cat(entropies)


def integrate_classes(
    chunks: Iterable[tuple[Tensor, Root]],
    outputs: int,
    budget: int,
    rows: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> ClassIntegrals:
    """Integrate the class probabilities over f ~ N(f̂, K), a chunk of rows at a time.

    chunks: f̂ (B, C) in float64 and a root of K for each. outputs: C; one output has two classes.
    budget: bytes of intermediate results. rows: the number of rows of all chunks together;
    if it is given, answers are written into one array and never held twice. dtype: of the log
    probabilities and the spread; without `rows` it is float64 in any case.
    """
    integrate = _choose_integrator(outputs, budget, rows)
    integrals_of_chunks = (integrate(f, root) for f, root in chunks)
    if rows is None:
        return _join_chunks(list(integrals_of_chunks), outputs)
    classes = max(outputs, 2)
    integrals = ClassIntegrals(
        torch.empty(rows, classes, dtype=dtype),
        torch.empty(rows, classes, dtype=dtype),
        torch.empty(rows, dtype=torch.float64),
    )
    start = 0
    for of_chunk in integrals_of_chunks:
        block = slice(start, start + len(of_chunk.entropy))
        for target, values in zip(integrals, of_chunk, strict=True):
            target[block] = values
        start = block.stop
    assert start == rows
    return integrals


def integrate_with_graph(chunks: Iterable[tuple[Tensor, Root]], outputs: int) -> ClassIntegrals:
    """Integrate as `integrate_classes`, with the autograd graph of f̂ and of the roots.

    chunks, outputs: as there. The nodes are the same. The arrays (B, C, S) of all chunks are held,
    because the graph needs them.
    """
    integrate = _integrate_binary if outputs <= 2 else _integrate_softmax_with_graph
    return _join_chunks([integrate(f, root) for f, root in chunks], outputs)


def _join_chunks(chunks: list[ClassIntegrals], outputs: int) -> ClassIntegrals:
    """Join the integrals of all chunks in order; without a chunk they are those of no rows."""
    no_rows = torch.empty(0, max(outputs, 2), dtype=torch.float64)
    chunks = chunks or [ClassIntegrals(no_rows, no_rows, no_rows[:, 0])]
    return ClassIntegrals(*map(torch.cat, zip(*chunks, strict=True)))


def _choose_integrator(
    outputs: int, budget: int, rows: int | None
) -> Callable[[Tensor, Root], ClassIntegrals]:
    """Return the function that integrates a chunk, given as f̂ (B, C) and a root of K.

    The choice depends on the number of outputs, and for each chunk on whether its roots share a
    basis. budget and rows: as in `integrate_classes`.
    """
    if outputs <= 2:
        return _integrate_binary

    # one node of each mirrored pair (S/2, C)
    half = make_softmax_nodes(outputs).mT[: POINTS // 2].contiguous()
    integrator_by_slabs = SoftmaxIntegrals(half, budget, are_nodes_whitened(outputs), rows)

    def integrate(f: Tensor, root: Root) -> ClassIntegrals:
        """Integrate a chunk, from f̂ (B, C) and a root of K.

        Rows are integrated in blocks, or in slabs of nodes where classes are many.
        """
        if outputs < (MANY if isinstance(root, ScaledRoot) else MANY_FULL):
            return _integrate_softmax(f, root, budget)
        log_probs, spread, entropy = integrator_by_slabs(f, root)
        return ClassIntegrals(torch.log_softmax(log_probs, 1), spread, entropy)

    return integrate


def _integrate_softmax_with_graph(f: Tensor, root: Root) -> ClassIntegrals:
    """Integrate a chunk of three or more classes with its autograd graph.

    f: f̂ (B, C). root: of K. The nodes are z (C, S).
    """
    z = make_softmax_nodes(f.shape[1]).to(root.dtype)
    logs = torch.log_softmax(
        f.unsqueeze(-1) + multiply_root_by_nodes(root, z).double(), 1
    )  # (B, C, S)
    p = logs.exp()
    entropy = -(p * logs.clamp_min(LOWEST)).sum(1).mean(-1)
    return ClassIntegrals(
        torch.log_softmax(logs.logsumexp(-1), 1), p.var(-1, correction=0), entropy
    )


def _integrate_binary(f: Tensor, root: Root) -> ClassIntegrals:
    """Integrate a chunk of two classes, from f̂ (B, 1) or (B, 2) and a root of K.

    The probability of the second class is the sigmoid of one logit: the only output, or the
    difference of the two.
    """
    size = f.shape[1]
    R = root.multiply(torch.eye(size, dtype=root.dtype)).double()
    if size == 1:
        mean, row_of_root = f[:, 0], R[:, 0]
    else:
        mean, row_of_root = f[:, 1] - f[:, 0], R[:, 1] - R[:, 0]
    # With K = R Rᵀ, the logit aᵀf has variance ‖aᵀR‖².
    sd = torch.linalg.vector_norm(row_of_root, dim=1)
    log_one, log_zero, spread = logistic_normal(mean, sd)
    log_probs = torch.log_softmax(torch.stack([log_zero, log_one], 1), 1)
    return ClassIntegrals(log_probs, torch.stack([spread, spread], 1), expected_entropy(mean, sd))


def _integrate_softmax(f: Tensor, root: Root, budget: int) -> ClassIntegrals:
    """Integrate a chunk of three or more classes in blocks of rows, from f̂ (B, C) and a root of K.

    A block has as many rows as fit the cache and the budget (bytes), and at least one.
    """
    size = f.shape[1]
    z = make_softmax_nodes(size).to(root.dtype)
    entries = min(ENTRIES_AT_ONCE, budget // (COPIES * root.dtype.itemsize))
    rows = max(entries // z.numel(), 1)
    integrals = ClassIntegrals(torch.empty_like(f), torch.empty_like(f), torch.empty_like(f[:, 0]))
    for start in range(0, len(f), rows):
        block = slice(start, start + rows)
        block_integrals = _integrate_block(f[block], root.select_rows(block), z)
        for target, values in zip(integrals, block_integrals, strict=True):
            target[block] = values
    return integrals


def make_softmax_nodes(size: int) -> Tensor:
    """Return the nodes z (C, S) for C = size outputs: S/2 points, and then their mirror images."""
    return normal_nodes(size, POINTS // 2)[0].mT.contiguous()


def are_nodes_whitened(size: int) -> bool:
    """Tell whether the nodes for `size` outputs have unit variance in every direction.

    `normal_nodes` whitens them where there are at least two mirrored pairs for each output.
    Otherwise R z is rescaled for each output (`multiply_root_by_nodes`).
    """
    return 4 * size <= POINTS


def _integrate_block(f: Tensor, root: Root, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate a block of rows, from f̂ (B, C) and a root of K, over nodes z (C, S) at once.

    Returns log probabilities (B, C), Var p (B, C) and the mean entropy (B,). Its own arrays
    (B, C, S) are changed in place, because memory limits the size of a block.
    """
    # Adding a constant to all outputs does not change a softmax. With the largest output at zero
    # nothing overflows.
    top = f - f.amax(1, keepdim=True)
    logits = multiply_root_by_nodes(root, z).add_(top.to(z.dtype).unsqueeze(-1))  # (B, C, S)
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

    # Probabilities too small for the dtype are summed in logarithms, row by row: they are rare.
    for row in (mean < TINY[z.dtype]).any(1).nonzero().squeeze(-1).tolist():
        single = slice(row, row + 1)
        logits = (
            multiply_root_by_nodes(root.select_rows(single), z)
            .double()
            .add_(top[single].unsqueeze(-1))
        )
        log_probs[single] = torch.log_softmax(logits, 1).logsumexp(-1)

    return torch.log_softmax(log_probs, 1), spread, entropy


def multiply_root_by_nodes(root: Root, z: Tensor) -> Tensor:
    """Return R z (B, C, S) for nodes z (C, S), with exact variances of the outputs.

    root: R. The variance of each output over the nodes is its diagonal entry of K. Nodes that are
    not whitened have this variance only on average over outputs, so that the result is rescaled.
    """
    moved = root.multiply(z)
    if are_nodes_whitened(z.shape[0]):
        return moved
    variance_of_nodes = torch.linalg.vecdot(moved, moved) / z.shape[1]
    ratio = torch.where(variance_of_nodes > 0, root.variances() / variance_of_nodes, 1.0)
    factor = ratio.sqrt().unsqueeze(-1)
    # In place saves memory, but autograd needs the old values.
    return moved * factor if moved.requires_grad else moved.mul_(factor)


def divide_by_temperature(
    likelihood: Likelihood, chunks: Iterable[tuple[Tensor, Root]]
) -> Iterator[tuple[Tensor, Root]]:
    """Yield f̂/T and a root of K/T² for each chunk, with T the temperature of the likelihood.

    The integrals of these at temperature 1 are those of the likelihood. chunks: f̂ (B, C) and a root
    of K for each. Raises AssertionError unless the likelihood has a `logit_temperature`.
    """
    temperature = likelihood.logit_temperature
    assert temperature is not None
    for f, root in chunks:
        yield (f, root) if temperature == 1 else (f / temperature, root.scale_by(1 / temperature))


def differentiate_log_probs(f: Tensor, K: Tensor, df: Tensor, dK: Tensor) -> Tensor:
    """Return the derivative of log P(Y = c) when f̂ moves by df and K by dK, at temperature 1.

    f, df (N, C) and K, dK (N, C, C) -> (N, C); one output has two classes, (N, 2).

    By Bonnet's and Price's theorems dE p_c = E[∇p_c]ᵀdf + ½ tr(E[∇²p_c] dK). The expectations are
    over the nodes of the integrals.
    """
    if f.shape[1] <= 2:
        # Two classes have one logit aᵀf. It becomes the output of the second class, and the output
        # of the first class is zero.
        a = torch.tensor([1.0] if f.shape[1] == 1 else [-1.0, 1.0], dtype=f.dtype)
        second_class = torch.tensor([0.0, 1.0], dtype=f.dtype)
        corner = torch.outer(second_class, second_class)
        f, df = (torch.outer(vectors @ a, second_class) for vectors in (f, df))
        K, dK = ((matrices @ a @ a)[:, None, None] * corner for matrices in (K, dK))
        line, weights = normal_trapezoidal_rule()
        z = torch.stack([torch.zeros_like(line), line])
    else:
        z = make_softmax_nodes(f.shape[1])
        weights = torch.full_like(z[0], 1 / z.shape[1])
    root = full_root(K)
    rows = max(ENTRIES_AT_ONCE // z.numel(), 1)
    slopes = torch.empty_like(f)
    for start in range(0, len(f), rows):
        block = slice(start, start + rows)
        logits = f[block].unsqueeze(-1) + multiply_root_by_nodes(root.select_rows(block), z)
        p = torch.softmax(logits, 1).mT  # (B, S, C)
        # ∇p_cᵀdf = p_c (df_c − pᵀdf); tr(∇²p_c dK) = p_c (dK_cc − 2(dK p)_c + 2pᵀdK p − pᵀdiag dK)
        p_dK = p @ dK[block]
        p_dK_p = (p_dK * p).sum(-1, keepdim=True)
        diagonal = dK[block].diagonal(dim1=1, dim2=2)
        first = df[block].unsqueeze(1) - p @ df[block].unsqueeze(-1)
        second = diagonal.unsqueeze(1) - 2 * p_dK + 2 * p_dK_p - p @ diagonal.unsqueeze(-1)
        slopes[block] = (weights @ (p * (first + 0.5 * second))) / (weights @ p)

    return slopes
