"""Multi-head attention of torch as three projections, products of their results, and a fourth
projection.

`nn.MultiheadAttention` gives its weights to one function of torch, so that no linear call can be
intercepted. `attend` computes the same in steps, and leaves each projection to its caller, who can
then read its inputs and differentiate its outputs. Query, key and value have a projection each,
also where their weights are rows of one matrix: their inputs may be different.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

ATTENTION = F.multi_head_attention_forward
SIGNATURE = inspect.signature(ATTENTION)


class Projection(Protocol):
    """A function that computes x Wᵀ + b with some rows of the weight and the bias."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: int,
        bias_first: int,
        count: int,
    ) -> Tensor:
        """Return x Wᵀ + b (..., count) for x (..., in).

        It uses `count` rows of the weight from `first` on, and of the bias from `bias_first` on.
        """


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, first: int, bias_first: int, count: int
) -> Tensor:
    """Return the projection of x (..., in) without recording it: see `Projection`."""
    rows = weight[first : first + count]
    return F.linear(x, rows, None if bias is None else bias[bias_first : bias_first + count])


def read_attention(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments by name, if it is a call of attention that `attend` can compute, else
    None.

    `attend` does not support dropout, a single sequence without a dimension for rows, or keys and
    values that are given after their projection.
    """
    if func is not ATTENTION:
        return None
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    random = given["training"] and given["dropout_p"] > 0
    static = given["static_k"] is not None or given["static_v"] is not None
    return None if random or static or given["query"].dim() != 3 else given


def attend(given: Mapping[str, Any], projection: Projection) -> tuple[Tensor, Tensor | None]:
    """Return what `F.multi_head_attention_forward` does: (L, N, E), and the attention (N, L, S) or
    None.

    given: its arguments by name. projection computes each of the four projections.
    """
    rows, heads = given["query"].shape[1], given["num_heads"]
    q, k, v = _project_inputs(given, projection)
    if given["bias_k"] is not None:
        k = torch.cat([k, given["bias_k"].expand(1, rows, -1)])
        v = torch.cat([v, given["bias_v"].expand(1, rows, -1)])
    if given["add_zero_attn"]:
        k, v = (torch.cat([values, torch.zeros_like(values[:1])]) for values in (k, v))
    mask = _joint_mask(*_score_masks(given), len(k), rows, heads)
    # Each becomes (N, heads, places, E / heads).
    q, k, v = (values.unflatten(2, (heads, -1)).permute(1, 2, 0, 3) for values in (q, k, v))
    attention = None
    if given["need_weights"]:
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
        attention = torch.softmax(scores if mask is None else scores + mask, -1)
        mixed = attention @ v
        attention = attention.mean(1) if given["average_attn_weights"] else attention
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    weight = given["out_proj_weight"]
    return projection(mixed, weight, given["out_proj_bias"], 0, 0, len(weight)), attention


def _project_inputs(given: Mapping[str, Any], projection: Projection) -> list[Tensor]:
    """Return query, key and value (places, N, E) after their projections."""
    inputs = (given["query"], given["key"], given["value"])
    width = given["query"].shape[2]
    bias_firsts = [0, width, 2 * width]
    if given["use_separate_proj_weight"]:
        weights = [given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"]]
        firsts = [0, 0, 0]
    else:
        weights = [given["in_proj_weight"]] * 3
        firsts = bias_firsts
    return [
        projection(x, weight, given["in_proj_bias"], first, bias_first, width)
        for x, weight, first, bias_first in zip(inputs, weights, firsts, bias_firsts, strict=True)
    ]


def _score_masks(given: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of the attention and that of the padding as numbers that are added to the
    scores.
    """
    query = given["query"]
    keys = len(given["key"])
    mask = _as_added_numbers(given["attn_mask"], query.dtype)
    padding = _as_added_numbers(given["key_padding_mask"], query.dtype)
    # With is_causal torch ignores the values of the mask and uses a causal one.
    causal = given["is_causal"] and padding is None and not given["need_weights"]
    if causal and mask is not None:
        later = torch.ones(len(query), keys, dtype=torch.bool, device=query.device).triu(1)
        mask = _as_added_numbers(later, query.dtype)
    return mask, padding


def _as_added_numbers(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as numbers that are added to the scores: −∞ where a boolean one is true."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _joint_mask(
    mask: Tensor | None, padding: Tensor | None, keys: int, rows: int, heads: int
) -> Tensor | None:
    """Return the sum of both masks, which broadcasts to (N, heads, L, S); None without a mask.

    mask is (L, S) or (N·heads, L, S), and padding is (N, S). keys: the number of keys with those
    that were appended.
    """
    # Keys that were appended are never masked, so masks are padded with zeros.
    masks = []
    if mask is not None:
        by_head = mask if mask.dim() == 2 else mask.unflatten(0, (rows, heads))
        masks.append(F.pad(by_head, (0, keys - by_head.shape[-1])))
    if padding is not None:
        masks.append(F.pad(padding, (0, keys - padding.shape[-1]))[:, None, None])
    return sum(masks[1:], masks[0]) if masks else None
