"""The statistics of one attention layer and of its parts, over several images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from linvit.analysis.attention_matrix import Channel
from linvit.analysis.attention_statistics import SPECTRAL, attention_statistics
from linvit.analysis.channel_matrix import CHANNELS, channel_matrix, channel_statistics
from linvit.analysis.matrix_parts import matrix_parts
from linvit.analysis.recorder import Call
from linvit.analysis.rows import ROW_STATISTICS

STATISTICS = (*SPECTRAL, *ROW_STATISTICS)
"""What `layer_statistics` gives, in the order of tables."""


def layer_statistics(
    calls: Sequence[Call], *, channel: Channel | None, rtol: float | None = None, max_tokens: int | None = None
) -> dict[str, dict[str, Tensor]]:
    """Statistics of the whole matrix under the name "", and of each part; see `attention_statistics`.

    Of a mechanism that mixes channels and no tokens there are those of its channel matrix alone, under the name
    `CHANNELS`.

    Args:
        calls: What the layer received for each image; of windows the first one is measured.
        channel: Of a mechanism whose matrix differs per channel: the index of one, "mean", or None for each.
        rtol: Relative tolerance of the rank; None is max(N, M) times the float64 epsilon.
        max_tokens: With more queries or keys and without thin factors a part is left out.

    Returns:
        (images, h) by part and name, on the CPU, or (images, h, d).
    """
    found: dict[str, dict[str, list[Tensor]]] = {}
    for call in (call.first() for call in calls):
        mixing = channel_matrix(call.mechanism, call.q, call.k, call.grid)
        if mixing is not None:
            for name, value in channel_statistics(mixing, rtol).items():
                found.setdefault(CHANNELS, {}).setdefault(name, []).append(value.cpu())
            continue
        for part, mechanism in {"": call.mechanism, **matrix_parts(call.mechanism)}.items():
            numbers = attention_statistics(
                mechanism,
                call.q,
                call.k,
                call.grid,
                v=call.v,
                bias=call.bias if mechanism.takes_bias else None,
                x=call.x if mechanism.takes_input else None,
                channel=channel,
                rtol=rtol,
                max_tokens=max_tokens,
            )
            for name, value in numbers.items():
                found.setdefault(part, {}).setdefault(name, []).append(value.cpu())
    return {part: {name: torch.cat(each) for name, each in numbers.items()} for part, numbers in found.items()}


def per_head(numbers: dict[str, Tensor]) -> list[list[float]]:
    """The numbers of each head in the order of `STATISTICS`, means over images and channels."""
    heads = [numbers[name].movedim(1, 0).flatten(1).nanmean(1).tolist() for name in STATISTICS]
    return [list(values) for values in zip(*heads, strict=True)]
