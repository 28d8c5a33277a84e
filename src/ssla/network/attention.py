"""Multi-head attention of torch as three projections, products of their results, and a fourth
projection.

`nn.MultiheadAttention` gives its weights to one function of torch, so that no linear call can be
intercepted. `compute_attention` computes the same in steps, and leaves each projection to a
function of its caller, who can then read its inputs and differentiate its outputs. Query, key and
value have a projection each, also where their weights are rows of one matrix: their inputs may be
different.
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
# Shapes below: query (L, N, E), key and value (S, N, E): L and S places, N rows, E numbers.


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

        W are the `count` rows of the weight from `first` on, and b are the entries of the bias from
        `bias_first` on. bias=None: there is no b.
        """


def compute_projection(
    x: Tensor, weight: Tensor, bias: Tensor | None, first: int, bias_first: int, count: int
) -> Tensor:
    """Return the projection of x (..., in) without recording it: see `Projection`."""
    rows = weight[first : first + count]
    return F.linear(x, rows, None if bias is None else bias[bias_first : bias_first + count])


def read_attention(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a call by name, with defaults; None for any other call.

    func, args, kwargs: the call. It is read if it is an attention that `compute_attention` can
    compute: without dropout, with a dimension for rows, and with keys and values that are given
    before their projection.
    """
    if func is not ATTENTION:
        return None
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    is_random = given["training"] and given["dropout_p"] > 0
    is_projected = given["static_k"] is not None or given["static_v"] is not None
    has_rows = given["query"].dim() == 3
    return given if has_rows and not is_random and not is_projected else None


def compute_attention(
    given: Mapping[str, Any], projection: Projection
) -> tuple[Tensor, Tensor | None]:
    """Return the two results of `F.multi_head_attention_forward`, computed in steps.

    The first is (L, N, E). The second is the attention, (N, L, S), or (N, heads, L, S) if it is not
    averaged over the heads; None if it was not asked for. given: the arguments by name, from
    `read_attention`. projection: computes each of the four projections.
    """
    rows = given["query"].shape[1]
    heads = given["num_heads"]
    q, k, v = _project_inputs(given, projection)

    # Learned keys and values, and those of zeros, are appended as further places.
    if given["bias_k"] is not None:
        k = torch.cat([k, given["bias_k"].expand(1, rows, -1)])
        v = torch.cat([v, given["bias_v"].expand(1, rows, -1)])
    if given["add_zero_attn"]:
        k = torch.cat([k, torch.zeros_like(k[:1])])
        v = torch.cat([v, torch.zeros_like(v[:1])])
    mask = _add_masks(*_make_score_masks(given), len(k), rows, heads)
    q, k, v = (_split_heads(values, heads) for values in (q, k, v))
    attention = None

    # The operations are those of torch, in its order, so that the results have the same bits.
    if given["need_weights"]:
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
        attention = torch.softmax(scores if mask is None else scores + mask, -1)
        mixed = attention @ v
        attention = attention.mean(1) if given["average_attn_weights"] else attention
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)  # (L, N, E)
    weight = given["out_proj_weight"]
    projected: Tensor = projection(mixed, weight, given["out_proj_bias"], 0, 0, len(weight))
    return projected, attention


def _split_heads(values: Tensor, heads: int) -> Tensor:
    """Return values (places, N, E) as (N, heads, places, E / heads)."""
    split: Tensor = values.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
    return split


def _project_inputs(given: Mapping[str, Any], projection: Projection) -> list[Tensor]:
    """Return query (L, N, E), key and value (S, N, E) after their projections.

    given: the arguments of the attention by name.
    """
    inputs = (given["query"], given["key"], given["value"])
    width = given["query"].shape[2]
    # One bias holds those of all three, also where there are three weights.
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


def _make_score_masks(given: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of the attention and that of the padding; None for one that is not given.

    Both are numbers that are added to the scores: (L, S) or (N·heads, L, S), and (N, S).
    """
    query = given["query"]
    keys = len(given["key"])
    mask = _convert_mask(given["attn_mask"], query.dtype)
    padding = _convert_mask(given["key_padding_mask"], query.dtype)
    # With is_causal torch ignores the values of the mask and uses a causal one.
    causal = given["is_causal"] and padding is None and not given["need_weights"]
    if causal and mask is not None:
        later = torch.ones(len(query), keys, dtype=torch.bool, device=query.device).triu(1)
        mask = _convert_mask(later, query.dtype)
    return mask, padding


def _convert_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as numbers that are added to the scores: −∞ where a boolean one is true.

    The shape stays. None stays None.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _add_masks(
    mask: Tensor | None, padding: Tensor | None, keys: int, rows: int, heads: int
) -> Tensor | None:
    """Return the sum of both masks, which broadcasts to (N, heads, L, keys); None without a mask.

    mask is (L, S) or (N·heads, L, S), and padding is (N, S); None: there is none. keys: S and the
    number of places that were appended. rows: N.
    """
    # Keys that were appended are never masked, so masks are padded with zeros.
    masks = []
    if mask is not None:
        by_head = mask if mask.dim() == 2 else mask.unflatten(0, (rows, heads))
        masks.append(F.pad(by_head, (0, keys - by_head.shape[-1])))
    if padding is not None:
        masks.append(F.pad(padding, (0, keys - padding.shape[-1]))[:, None, None])
    return sum(masks[1:], masks[0]) if masks else None
