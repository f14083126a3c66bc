"""Maps of one query token: its row of the equivalent matrix over the image, its focus, and attention rollout."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from linvit.analysis.attention_matrix import attention_matrix, copy_without_hooks, formed_matrix
from linvit.analysis.recorder import Call
from linvit.errors import UserError


class Query(NamedTuple):
    """Query token: the class token, or the patch at a position in the image."""

    row: float | None = None  # fraction of the image's height; None is the class token, or the centre without one
    column: float | None = None  # fraction of its width

    def patch(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns row and column of the patch on a grid."""
        places = (0.5 if place is None else place for place in self)
        row, column = (min(int(place * side), side - 1) for place, side in zip(places, size, strict=True))
        return row, column


class QueryMap(NamedTuple):
    """Attention map of a query token."""

    weights: Tensor  # its row of the equivalent matrix, mean over heads (and channels), (H, W) of the keys
    focus: Tensor | None  # the share of each key in the query's output, (H, W), where defined
    is_class: bool  # True if the query is a class token


def query_map(call: Call, query: Query) -> QueryMap:
    """Returns the map of one query token of the first image; 0 where its window does not reach.

    `focus` is defined for all mechanisms as for Hydra attention. The output of query i is a sum over the keys,
    `o_i = sum_t g_t` with `g_t = M[i, t] v_t` in each channel, and `focus_t = <g_t, o_i> / <o_i, o_i>` over all heads
    and channels. It sums to 1 over all tokens and may be negative. Bolya et al. 2022 show such maps; the formula is
    linvit's.
    """
    window, index, is_class = _place(call, query)
    rows = _rows(call, window, index)  # (h, M, d)
    values = call.v[window].double()
    focus = None
    if rows.shape[0] == values.shape[0]:
        parts = rows * values  # g_t
        output = parts.sum(1, keepdim=True)
        focus = (parts * output).sum((0, 2)) / output.square().sum().clamp_min(torch.finfo(torch.double).tiny)
    weights = rows.mean((0, 2))
    maps = [None if found is None else _on_image(call, window, found) for found in (weights, focus)]
    return QueryMap(maps[0], maps[1], is_class)  # type: ignore[arg-type]


def rollout(calls: Mapping[str, Call], query: Query) -> Tensor:
    """Computes attention rollout (Abnar & Zuidema 2020), how patches reach a token of the last layer, (H, W).

    It is the product over the layers of `(A + I) / 2`, with A the mean matrix of heads and channels, whose rows are
    normalised to a sum of 1 by their magnitudes, since rows of linear attention may be negative.

    Raises:
        UserError: If a layer has windows, fewer keys than queries, or another number of tokens.
    """
    first = next(iter(calls.values()))
    product = torch.eye(first.grid.num_queries, dtype=torch.double, device=first.q.device)
    for layer, call in calls.items():
        whole = call.layout is None and len(call.q) == 1
        if not whole or call.grid != first.grid or call.grid.num_queries != call.grid.num_keys:
            raise UserError(
                f"attention rollout multiplies the matrices of all layers, which must be of all tokens of the image; "
                f"{layer} has windows, or another number of queries or keys"
            )
        values = None if call.mechanism.facts.linear_in_values else call.v[:1]
        matrix = formed_matrix(
            call.mechanism, call.q[:1], call.k[:1], call.grid, v=values, bias=call.bias, x=call.x, channel="mean"
        )
        mean = matrix[0].mean(0).abs()
        total = mean.sum(-1, keepdim=True)
        product = (mean / total.masked_fill(total == 0, 1) + torch.eye(len(mean), device=mean.device)) / 2 @ product
    window, index, _ = _place(first, query)
    return _on_image(first, window, product[index])


def _place(call: Call, query: Query) -> tuple[int, int, bool]:
    """Returns the window of a query, its place in the window, and whether it is a class token."""
    if call.layout is None and len(call.q) > 1:
        raise UserError(
            f"its {len(call.q)} windows have no known positions in the image, as in timm's Swin; use a backbone of "
            f"linvit, such as swin_tiny"
        )
    if query.row is None and call.grid.num_prefix:
        return 0, 0, True
    if call.layout is None:
        row, column = query.patch(call.grid.size)
        return 0, call.grid.num_prefix + row * call.grid.size[1] + column, False
    size, places = call.layout
    row, column = query.patch(size)
    window, index = (places == row * size[1] + column).nonzero()[0].tolist()
    return window, index, False


@torch.enable_grad()
def _rows(call: Call, window: int, index: int) -> Tensor:
    """Returns the query's rows of all matrices, (h, M, d), or (h', M, 1): output gradients if linear in the values."""
    q, k, v = (x[window : window + 1].double() for x in (call.q, call.k, call.v))
    given = {"bias": call.bias, "x": call.x}
    extra = {
        name: (x if len(x) == 1 else x[window : window + 1]).double() for name, x in given.items() if x is not None
    }
    if call.mechanism.facts.linear_in_values:
        copied = copy_without_hooks(call.mechanism).double().eval()
        v = v.detach().requires_grad_()
        (rows,) = torch.autograd.grad(copied.forward(q, k, v, call.grid, **extra)[:, :, index].sum(), v)
        return rows[0]
    matrix = attention_matrix(call.mechanism, q, k, call.grid, v=v, channel=None, **extra)
    row = matrix[0][..., index, :]  # (h, M), or (h, d, M)
    return row.mT if row.ndim == 3 else row.unsqueeze(-1)


def _on_image(call: Call, window: int, weights: Tensor) -> Tensor:
    """Returns weights (M,) of a window's keys as a map of the image, without the prefix tokens."""
    weights = weights[call.grid.num_prefix :]
    if call.layout is None:
        return weights.view(call.grid.keys_size)
    size, places = call.layout
    inside = places[window] >= 0
    found = weights.new_zeros(math.prod(size))
    found[places[window][inside]] = weights[inside]
    return found.view(size)
