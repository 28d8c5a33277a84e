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
    """x Wᵀ + b with `count` rows of the weight from `first` on, and of the bias from
    `bias_first` on.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: int,
        bias_first: int,
        count: int,
    ) -> Tensor: ...


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, first: int, bias_first: int, count: int
) -> Tensor:
    """The projection itself."""
    rows = weight[first : first + count]
    return F.linear(x, rows, None if bias is None else bias[bias_first : bias_first + count])


def read_attention(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments by name, if it is a call of attention that `attend` can compute.

    Not for a single sequence without a dimension for rows, keys or values that are given after
    their projection, or dropout.
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
    """As `F.multi_head_attention_forward`: (L, N, E), and the attention (N, L, S) if it is
    asked for.
    """
    query, key = given["query"], given["key"]
    length, rows, width = query.shape
    heads = given["num_heads"]
    q, k, v = _projected(given, width, projection)
    masks = (
        _added(given["attn_mask"], query.dtype),
        _added(given["key_padding_mask"], query.dtype),
    )
    hint = given["is_causal"] and masks[1] is None and not given["need_weights"]
    if hint and masks[0] is not None:  # torch takes the word for the mask
        later = torch.ones(length, key.shape[0], dtype=torch.bool, device=query.device).triu(1)
        masks = (_added(later, query.dtype), None)
    if given["bias_k"] is not None:
        k = torch.cat([k, given["bias_k"].expand(1, rows, -1)])
        v = torch.cat([v, given["bias_v"].expand(1, rows, -1)])
    if given["add_zero_attn"]:
        k, v = (torch.cat([part, torch.zeros_like(part[:1])]) for part in (k, v))
    mask = _joint_mask(*masks, len(k), rows, heads)
    # Each becomes (N, heads, places, E / heads).
    q, k, v = (part.unflatten(2, (heads, -1)).permute(1, 2, 0, 3) for part in (q, k, v))
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


def _projected(given: Mapping[str, Any], width: int, projection: Projection) -> list[Tensor]:
    """Query, key and value (places, N, E) after their projections."""
    bias, parts = given["in_proj_bias"], (given["query"], given["key"], given["value"])
    starts = [0, width, 2 * width]
    if given["use_separate_proj_weight"]:
        weights = [given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"]]
        firsts = [0, 0, 0]
    else:
        weights, firsts = [given["in_proj_weight"]] * 3, starts
    each = zip(parts, weights, firsts, starts, strict=True)
    return [projection(x, weight, bias, first, start, width) for x, weight, first, start in each]


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as numbers that are added to the scores: −∞ where a boolean one is true."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _joint_mask(
    attention: Tensor | None, padding: Tensor | None, keys: int, rows: int, heads: int
) -> Tensor | None:
    """Both masks as one, which broadcasts to (N, heads, L, S).

    Keys that were appended are never masked.
    """
    parts = []
    if attention is not None:
        own = attention if attention.dim() == 2 else attention.unflatten(0, (rows, heads))
        parts.append(F.pad(own, (0, keys - own.shape[-1])))
    if padding is not None:
        parts.append(F.pad(padding, (0, keys - padding.shape[-1]))[:, None, None])
    return sum(parts[1:], parts[0]) if parts else None
