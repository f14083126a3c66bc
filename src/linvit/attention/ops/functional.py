"""Mathematics that several mechanisms use, without parameters and in the precision of the inputs."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SizeOf = Callable[[int], tuple[int, int] | None]
"""Returns the patch grid (H, W) of a number of patches in a checkpoint, or None if it is not known."""


def is_exporting() -> bool:
    """Returns True if `torch.export` traces; torch 2.11's own function is also true under `torch.compile`."""
    exporting: bool = torch.compiler._is_exporting_flag
    return exporting


def wide(x: Tensor) -> torch.dtype:
    """Returns the dtype of x, or float32 if that has more digits."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """Casts half precision to float32; float32 and float64 are unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of (n, m) and (m, d), or of (b, n, m) and (b, m, d), in a wider dtype, with no sum rounded before."""
    wider = a.is_cuda and torch.version.hip is None  # torch documents its product for CUDA alone, without a derivative
    if wider and a.dtype != dtype and not torch.is_grad_enabled():
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def channelwise_factors(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Factors (B, h, d, N, 1), (B, h, d, M, 1) of the matrices that `channelwise_attention` applies to v; views."""
    return q.mT.unsqueeze(-1), k.mT.unsqueeze(-1)


def safe_norm(
    x: Tensor, eps: float, order: float = 2, dims: tuple[int, ...] = (-1,), dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the divisor of `normalize`, with `dims` kept at length 1: `max(||x||, eps)`, and 1 for zero vectors."""
    norm: Tensor = torch.linalg.vector_norm(x, order, dims, keepdim=True, dtype=dtype)
    return F.threshold(norm, 0, 1).clamp_min(eps)


def l2_norm(x: Tensor) -> Tensor:
    """Returns L2 norms over the last dimension, (..., C) -> (..., 1)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # type: ignore[no-any-return]


def linear_as_given(layer: nn.Linear, x: Tensor) -> Tensor:
    """Returns a linear layer in the precision of its input, whatever that of its parameters."""
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def initial_steps(count: int) -> Tensor:
    """Returns biases (count,) of step sizes, whose softplus is log-uniform from 0.001 to 0.1, as Mamba begins."""
    steps = torch.empty(count).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return steps + torch.log(-torch.expm1(-steps))


def join_heads(x: Tensor) -> Tensor:
    """(B, h, N, d) -> (B, N, h d); a view of what `split_heads` gave."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, h d) -> (B, h, N, d); a view."""
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]


def same_size(old: Sequence[int], new: Sequence[int]) -> bool:
    """Returns True if a table for the size `old` fits `new`; never in an exported program for any size."""
    if {*map(type, new)} != {int} and is_exporting():
        return False
    return tuple(old) == tuple(new)


def resize_tokens(
    tokens: Tensor, old: tuple[int, int], new: tuple[int, int], mode: str = "bicubic", antialias: bool = False
) -> Tensor:
    """Returns a table of patch tokens (1, H*W, C) interpolated from one grid to another, "bicubic" or "bilinear"."""
    if same_size(old, new):
        return tokens
    grid = tokens.mT.unflatten(2, old)  # (1, C, H, W)
    resized = F.interpolate(upcast(grid), size=new, mode=mode, align_corners=False, antialias=antialias)
    return resized.to(tokens.dtype).flatten(2).mT  # (1, H'*W', C)


def pooled(x: Tensor, side: int) -> Tensor:
    """Returns the means of a map (B, C, H, W) over side x side parts, as `F.adaptive_avg_pool2d` makes them.

    In export by products, since torch's decomposition fixes the positions of the parts of the exported map.
    """
    if not is_exporting():
        return F.adaptive_avg_pool2d(x, side)
    part = torch.arange(side, device=x.device)[:, None]

    def shares(length: int) -> Tensor:
        """Returns the share of each row or column in each of the parts, (side, length)."""
        place = torch.arange(length, device=x.device)
        inside = (place >= part * length // side) & (place * side < (part + 1) * length)
        return inside.to(x.dtype) / inside.sum(1, keepdim=True)

    return shares(x.shape[2]) @ x @ shares(x.shape[3]).mT


def grid_from_count(count: int, img_size: tuple[int, int]) -> tuple[int, int] | None:
    """Returns the grid (H, W) of an image with `count` patches; None if the image has no such grid.

    H and W are the sides of the image divided by some patch size, both rounded up (padded images) or both rounded down
    (cropped images). An image size of (1, 1) means any square image, whose grid is square.
    """
    for height in range(1, count + 1):
        width, rest = divmod(count, height)
        if rest:
            continue
        # The patch size is in [exact, above) if sides are rounded up, and in (below, exact] if they are rounded down.
        counts = tuple(zip(img_size, (height, width), strict=True))
        exact = [side / n for side, n in counts]
        above = [side / (n - 1) if n > 1 else math.inf for side, n in counts]
        below = [side / (n + 1) for side, n in counts]
        if max(exact) < min(above) or max(below) < min(exact):
            return height, width
    return None


def resize_table(
    given: Tensor,
    own: Tensor,
    size: tuple[int, int],
    size_of: SizeOf,
    mode: str = "bicubic",
    antialias: bool = False,
) -> Tensor:
    """Returns a checkpoint's table (1, N', C) or (N', C) for a model's grid (H, W), in the shape of the model's `own`.

    Rows of prefix tokens come first, then one per patch, row by row; missing prefix rows are taken from the model,
    surplus ones are left out. A table of that grid, or one that does not fit, is returned
    unchanged. `mode` is "bicubic" or "bilinear"; with `antialias` values are smoothed, as timm does.
    """
    if given.ndim < 2 or (*given.shape[:-2], given.shape[-1]) != (*own.shape[:-2], own.shape[-1]):
        return given
    rows, prefix = given.shape[-2], own.shape[-2] - math.prod(size)
    for extra in (prefix,) if rows == own.shape[-2] else (prefix, 0, 1, 2):
        old = size_of(rows - extra) if rows > extra else None
        if old is not None:
            break
    if old is None or (old, extra) == (size, prefix):
        return given
    shared = min(extra, prefix)
    lacking = own[..., shared:prefix, :].to(given)
    patches = resize_tokens(given[..., extra:, :].reshape(1, -1, given.shape[-1]), old, size, mode, antialias)
    return torch.cat([given[..., :shared, :], lacking, patches.reshape(*own.shape[:-2], *patches.shape[1:])], dim=-2)
