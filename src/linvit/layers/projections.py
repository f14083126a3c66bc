"""Copies the weights of one attention layer into another."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention

Rows = Mapping[str, tuple[Tensor, Tensor | None]]
"""Weight and bias of each projection, by letter: "q", "k", "v"."""


def rows_of(layer: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Returns views of the rows of `qkv`, or of `q` and `kv`, by the letters of the layer's `projections`."""
    letters, widths = layer.projections, layer.widths
    count = len(widths) // len(letters)  # branches; their rows of one letter are adjacent
    wide = [sum(widths[i * count : (i + 1) * count]) for i in range(len(letters))]
    linears = [(layer.qkv, wide)] if hasattr(layer, "qkv") else [(layer.q, wide[:1]), (layer.kv, wide[1:])]
    weights = [rows for linear, parts in linears for rows in linear.weight.split(parts)]
    biases = [rows for linear, parts in linears for rows in _split(linear.bias, parts)]
    return dict(zip(letters, zip(weights, biases, strict=True), strict=True))


def _split(bias: Tensor | None, parts: list[int]) -> list[Tensor | None]:
    return [None] * len(parts) if bias is None else list(bias.split(parts))


def joined(rows: Rows, letters: str) -> nn.Linear:
    """Builds one linear layer of the projections named by the letters."""
    weights, biases = zip(*(rows[letter] for letter in letters), strict=True)
    weight = torch.cat(weights)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=biases[0] is not None)
    layer.weight = nn.Parameter(weight.detach().clone())
    if biases[0] is not None:
        layer.bias = nn.Parameter(torch.cat(biases).detach().clone())
    return layer


def widened(proj: nn.Linear, width: int, heads: int, new_heads: int | None = None) -> nn.Linear:
    """Returns an output projection from `width` channels, in which each head's first channels are those of `proj`."""
    if width == proj.in_features:
        return proj
    wide = nn.Linear(width, proj.out_features, bias=proj.bias is not None).to(proj.weight)
    with torch.no_grad():
        copy_heads(proj.weight, wide.weight, heads, new_heads)
        if proj.bias is not None:
            wide.bias = proj.bias
    return wide


def copy_heads(old: Tensor, new: Tensor, heads: int, new_heads: int | None = None) -> None:
    """Copies an output projection's weight (C, h d) into one with fewer or more heads: the first channels of each."""
    into, kept = new.unflatten(1, (new_heads or heads, -1)), old.unflatten(1, (heads, -1))  # (C, h, d)
    count, width = (min(into.shape[i], kept.shape[i]) for i in (1, 2))
    into[:, :count, :width] = kept[:, :count, :width]


def copy_outputs(old: Tensor, new: Tensor, heads: Sequence[tuple[int, int]]) -> None:
    """Copies the weight of a layer's output projection by `copy_heads`; `heads` are (old, new) numbers per branch."""
    for counts, kept, into in zip(heads, old.chunk(len(heads), 1), new.chunk(len(heads), 1), strict=True):
        copy_heads(kept, into, *counts)


@torch.no_grad()
def keep_weights(old: Any, new: Any) -> None:
    """Copies the weights that two attention layers with different mechanisms have in common.

    Copied are the rows of q, k and v of equal shape (if the old mechanism ties the keys to the queries, the new keys
    start from the rows of q), the output projection, the spatial reduction, LePE, the table of relative positions, and
    norm, gate and stem; for a mechanism of the same class also its own parameters. A gate that the old layer lacks, or
    that has another type, is set to 1. Other parameters of the new layer keep their values.
    """
    given, wanted = rows_of(old), rows_of(new)
    if "q" in given:
        given.setdefault("k", given["q"])
    for letter in wanted.keys() & given.keys():
        for rows, kept in zip(wanted[letter], given[letter], strict=True):
            if rows is not None and kept is not None and rows.shape == kept.shape:
                rows.copy_(kept)
    theirs, ours = ([m for m in layer.modules() if isinstance(m, Attention)] for layer in (old, new))
    if [m.num_heads for m in theirs] == [m.num_heads for m in ours]:
        heads = [(kept.out_heads, mine.out_heads) for kept, mine in zip(theirs, ours, strict=True)]
        copy_outputs(old.proj.weight, new.proj.weight, heads)
    copied = {"qkv", "q", "kv", "mechanism" if [*map(type, theirs)] != [*map(type, ours)] else ""}
    if new.gate is not None and (old.gate is None or old.gate.silu is not new.gate.silu):
        new.gate.init_open()
        copied.add("gate")
    state, own = old.state_dict(), new.state_dict()
    whole = [name for name in own.keys() & state.keys() if not copied & {*name.split(".")} and name != "proj.weight"]
    new.load_state_dict({name: state[name] for name in whole if state[name].shape == own[name].shape}, strict=False)
