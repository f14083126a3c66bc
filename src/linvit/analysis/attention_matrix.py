"""The equivalent matrix of any mechanism, read off by probing: `o = M v + bias`."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid


@torch.no_grad()
def attention_matrix(
    mechanism: Attention,
    q: Tensor,
    k: Tensor,
    grid: Grid,
    *,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    x: Tensor | None = None,
) -> Tensor:
    """The matrix that a mechanism applies to its values, in float64 on the mechanism's device.

    Almost every mechanism is linear in v once q and k are given, so one-hot values read the matrix off `forward`
    itself, for any mechanism, a third party's included. A float64 copy in evaluation mode is probed: a rank must never
    be read from a product formed in lower precision. The mechanism itself is not touched, and its hooks do not fire.

    Args:
        mechanism: The mechanism.
        q: Queries (B, h, N, dk) as the mechanism receives them.
        k: Keys (B, h, M, dk).
        grid: Their grid.
        v: Values (B, h, M, d); needed only by a mechanism whose matrix depends on them (`probeable = False`).
        bias: Position bias (B or 1, h, N, M) for a mechanism that takes one.
        x: The layer's input (B, N, C) for a mechanism that takes it.

    Returns:
        (B, h, N, M), or (B, h, d, N, M) if the mechanism is `channelwise`. The additive bias is not part of it.
    """
    twin = copy.deepcopy(mechanism).double().eval()
    q, k = q.double(), k.double()
    extra = {name: tensor.double() for name, tensor in (("bias", bias), ("x", x)) if tensor is not None}
    if not mechanism.probeable:
        return twin.attention_matrix(q, k, None if v is None else v.double(), grid, **extra)  # type: ignore[operator, no-any-return]

    batch, heads, keys = k.shape[:3]
    channels = mechanism.head_dim
    silent = q.new_zeros(batch, heads, keys, channels)
    offset = twin.forward(q, k, silent, grid, **extra)
    columns = []
    for probe in _probes(silent, channelwise=mechanism.channelwise):
        answer = twin.forward(q, k, probe, grid, **extra) - offset  # (B, h, N, d)
        columns.append(answer.mT.unsqueeze(-1) if mechanism.channelwise else answer)
    return torch.cat(columns, dim=-1)[..., :keys]


def _probes(silent: Tensor, channelwise: bool) -> Iterator[Tensor]:
    """One-hot values: every channel at one key, or, where the channels agree, as many keys as there are channels."""
    keys, channels = silent.shape[-2:]
    step = 1 if channelwise else channels
    for start in range(0, keys, step):
        probe = silent.clone()
        for offset in range(min(step, keys - start)):
            probe[..., start + offset, slice(None) if channelwise else offset] = 1
        yield probe
