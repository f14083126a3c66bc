"""The equivalent matrix of any mechanism, `o = M v + bias`: probed, or as the sum of its parts; its thin factors."""

import copy
from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.value_conv import ConvolvedValues, depthwise_matrix
from linvit.errors import UserError

Channel = int | Literal["mean"]
PROBE_ELEMENTS = 2**22  # values per forward pass, 32 MiB in float64
CHANNELS = "channels"
"""Name of channel matrices in tables and curves, beside the names of parts of token matrices."""


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
    channel: Channel | None = None,
) -> Tensor:
    """Returns the matrix that a mechanism applies to its values, in float64, on the mechanism's device.

    Almost every mechanism is linear in v once q and k are given, so one-hot values read the matrix off `forward`
    itself, for any mechanism, including third-party ones. A float64 copy in evaluation mode is probed, because a rank
    must not be computed from a product formed in lower precision. The mechanism is not modified; its hooks do not run.

    Args:
        mechanism: The mechanism.
        q: Queries (B, h, N, dk) as the mechanism receives them.
        k: Keys (B, h, M, dk).
        grid: Their grid.
        v: Values (B, h, M, d); needed only by a mechanism whose matrix depends on them (`linear_in_values = False`).
        bias: Position bias (B or 1, h, N, M); left out where the mechanism takes none.
        x: The layer's input (B, N, C); left out where the mechanism takes none.
        channel: For a `channelwise` mechanism, the index of one channel, or "mean" for the mean over them; the others
            then take no memory. None means all channels.

    Returns:
        (B, h, N, M), or (B, h, d, N, M) if the mechanism is `channelwise` and no channel is chosen. The additive bias
        is not part of it.

    Raises:
        UserError: If the mechanism cannot be probed and does not define its matrix, or mixes channels, not tokens.
    """
    name = type(mechanism).__name__
    if mechanism.channel_matrix(q, k, grid) is not None:
        raise UserError(
            f"{name} mixes the channels of each token by a matrix A, {mechanism.head_dim} x {mechanism.head_dim} per "
            f"head, and no tokens, so it has no matrix over tokens and no rank there; linvit.analysis.channel_matrix "
            f"gives A"
        )
    if mechanism.facts.no_matrix:
        raise UserError(f"{name} has no matrix over tokens, and no rank: {mechanism.facts.no_matrix}")
    if not mechanism.facts.linear_in_values and not hasattr(mechanism, "attention_matrix"):
        raise UserError(
            f"{name} declares linear_in_values=False and has no attention_matrix(q, k, v, grid), so its matrix "
            f"cannot be computed; give it that method"
        )
    if mechanism.facts.linear_in_values and mechanism.out_dim != mechanism.dim:
        raise UserError(
            f"{name}: out_dim differs from dim ({mechanism.out_dim} and {mechanism.dim}), so no one matrix takes the "
            f"values to the output: declare linear_in_values=False and give attention_matrix(q, k, v, grid)"
        )
    copied = copy_without_hooks(mechanism).double().eval()
    q, k = q.double(), k.double()
    given = (("bias", bias, mechanism.host.accepts_bias), ("x", x, mechanism.host.input))
    extra = {name: tensor.double() for name, tensor, taken in given if taken and tensor is not None}
    if not mechanism.facts.linear_in_values:
        own: Tensor = copied.attention_matrix(q, k, None if v is None else v.double(), grid, **extra)  # type: ignore[operator]
        return of_channel(own, channel, 2) if mechanism.facts.channelwise else own
    if isinstance(copied, ConvolvedValues) and copied.depthwise is not None and grid.keys_size == grid.size:
        kernels = copied.depthwise.weight[:, 0].unflatten(0, (-1, mechanism.head_dim))  # (1 or h, d, k, k)
        written = depthwise_matrix(of_channel(kernels, channel, 1), grid)
        return written.expand(*k.shape[:2], *written.shape[1:])

    probes = _probes(mechanism, k)  # (P, h, M, d)
    zeros = torch.zeros_like(probes[:1])
    offset = _outputs(copied, q, k, zeros, grid, extra)
    step = max(1, PROBE_ELEMENTS // (k.shape[0] * zeros.numel()))
    outputs = (_outputs(copied, q, k, part, grid, extra) - offset for part in probes.split(step))  # (p, B, h, N, d)
    if mechanism.facts.channelwise:
        matrix = torch.cat([of_channel(part, channel, -1) for part in outputs]).movedim(0, -1)  # (B, h, N[, d], M)
        return matrix.transpose(2, 3) if channel is None else matrix
    matrix = torch.cat(list(outputs)).permute(1, 2, 4, 3, 0)  # (P, B, h, N, d) -> (B, h, d, N, P)
    # Probe p carried key p*d + c in channel c: (B, h, d, N, P) -> (B, h, N, P*d).
    return matrix.permute(0, 1, 3, 4, 2).flatten(3)[..., : k.shape[2]]


def of_channel(values: Tensor, channel: Channel | None, dim: int) -> Tensor:
    """Returns one channel of `values` along `dim`, or the mean over them; None returns all."""
    if channel is None:
        return values
    return values.mean(dim) if channel == "mean" else values.select(dim, channel)


@torch.no_grad()
def attention_factors(
    mechanism: Attention,
    q: Tensor,
    k: Tensor,
    grid: Grid,
    *,
    bias: Tensor | None = None,
    channel: Channel | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Returns thin factors of `attention_matrix` in float64; None if there are none or a bias is added to the logits.

    They are (B, h, N, r) and (B, h, M, r), or (B, h, d, N, r) and (B, h, d, M, r) if the mechanism is `channelwise` and
    no `channel` is chosen. Those of the mean over d channels have d r columns.
    """
    if bias is not None and mechanism.host.accepts_bias:
        return None
    factors = copy_without_hooks(mechanism).double().eval().factors(q.double(), k.double(), grid)
    if factors is None:
        return None
    channels = (mechanism.head_dim,) if mechanism.facts.channelwise else ()
    for factor, tokens in zip(factors, (q, k), strict=True):
        if factor.shape[2:-1] != (*channels, tokens.shape[2]):
            kind = "(B, h, d, N, r), (B, h, d, M, r)" if channels else "(B, h, N, r), (B, h, M, r)"
            raise UserError(
                f"{type(mechanism).__name__}, declared channelwise={mechanism.facts.channelwise}, has factors of "
                f"shapes {tuple(factors[0].shape)}, {tuple(factors[1].shape)} where they must be {kind}; see "
                f"Attention.factors"
            )
    left, right = factors
    if channel is None or not mechanism.facts.channelwise:
        return left, right
    if channel == "mean":  # the sum of the channels' products is the product of their columns side by side
        left, right = (factor.transpose(2, 3).flatten(3) for factor in factors)  # (B, h, N, d r), (B, h, M, d r)
        return left / mechanism.head_dim, right
    return left[:, :, channel], right[:, :, channel]


@torch.no_grad()
def matrix_parts(mechanism: Attention) -> dict[str, Attention]:
    """Returns the parts of a mechanism's matrix by name, from a float64 copy in evaluation mode; {} without parts."""
    return copy_without_hooks(mechanism).double().eval().matrix_parts()


@torch.no_grad()
def formed_matrix(
    mechanism: Attention,
    q: Tensor,
    k: Tensor,
    grid: Grid,
    *,
    bias: Tensor | None = None,
    channel: Channel | None = None,
    **given: Tensor | None,
) -> Tensor:
    """Returns `attention_matrix`, as the sum of its parts where the mechanism declares some; same arguments.

    Thin factors of a part are multiplied, and a depthwise convolution is written out; only the rest is probed. For
    focused attention at N = 197, d = 64 this takes milliseconds, where probing its convolution takes 15 seconds.
    """
    found = []
    parts = matrix_parts(mechanism) if mechanism.facts.linear_in_values else {}
    for part in parts.values() or [mechanism]:
        if parts and (factors := attention_factors(part, q, k, grid, bias=bias, channel=channel)) is not None:
            matrix = factors[0] @ factors[1].mT
        else:
            matrix = attention_matrix(part, q, k, grid, bias=bias, channel=channel, **given)
        each = mechanism.facts.channelwise and channel is None and not part.facts.channelwise
        found.append(matrix.unsqueeze(2) if each else matrix)  # the same for all channels
    return torch.stack(torch.broadcast_tensors(*found)).sum(0)


@torch.no_grad()
def channel_matrix(mechanism: Attention, q: Tensor, k: Tensor, grid: Grid) -> Tensor | None:
    """Returns the matrix A of `o = v A^T` in float64, (B, h, d, d), as in XCiT; None if the mechanism mixes tokens."""
    if type(mechanism).channel_matrix is Attention.channel_matrix:
        return None  # before a copy is made
    return copy_without_hooks(mechanism).double().eval().channel_matrix(q.double(), k.double(), grid)


def copy_without_hooks(mechanism: Attention) -> Attention:
    """Returns a deep copy without hooks: they must not run, and objects that they are bound to must not be copied."""
    hooks = [value for module in mechanism.modules() for name, value in vars(module).items() if name.endswith("_hooks")]
    return copy.deepcopy(mechanism, {id(value): OrderedDict() for value in hooks})


def _probes(mechanism: Attention, k: Tensor) -> Tensor:
    """Returns one-hot values (P, h, M, d): all channels at one key, or one key per channel with one matrix for all."""
    heads, keys, channels = mechanism.num_heads, k.shape[2], mechanism.head_dim
    if mechanism.facts.channelwise:
        return torch.eye(keys, dtype=k.dtype, device=k.device)[:, None, :, None].expand(keys, heads, keys, channels)
    count = -(-keys // channels)
    one_hot = torch.eye(count * channels, dtype=k.dtype, device=k.device)[:, :keys]  # (P*d, M)
    probes: Tensor = one_hot.unflatten(0, (count, channels)).mT[:, None]  # (P, 1, M, d)
    return probes.expand(count, heads, keys, channels)


def _outputs(copied: Attention, q: Tensor, k: Tensor, probes: Tensor, grid: Grid, extra: dict[str, Tensor]) -> Tensor:
    """Returns outputs (P, B, h, N, d) for the same queries and keys under each of the probes (P, h, M, d)."""
    count, batch = len(probes), len(q)

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.repeat(count, *[1] * (tensor.ndim - 1))  # (B, ...) -> (P*B, ...)

    context = {name: repeated(tensor) if len(tensor) == batch else tensor for name, tensor in extra.items()}
    out = copied.forward(repeated(q), repeated(k), probes.repeat_interleave(batch, 0), grid, **context)
    return out.reshape(count, batch, *out.shape[1:])
