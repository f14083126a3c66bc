"""Attention inside windows: partition, cyclic shift, padding, relative position bias and shift mask.

Paper: Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", Sec. 3.2.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Grid, Packed
from linvit.attention.ops.functional import SizeOf, grid_from_count
from linvit.errors import UserError, check_number
from linvit.layers.attention_layer import NOT_KEPT, AttentionLayer

MASK_VALUE = -1e4
"""Added to the logits of tokens that are not neighbours."""


class Windows(NamedTuple):
    """Layout of the tokens of a map (H, W) in windows (h, w).

    The map is zero-padded on the right and at the bottom to whole windows, or if `centred` on all sides (the half that
    is rounded down comes first), then rolled by `shift` rows and columns to the top left. Adjacent rows and columns
    of a window are `dilation` (r) apart in the map: r h x r w tokens have r^2 windows, one per position in r x r.
    """

    size: tuple[int, int]
    window: tuple[int, int]
    shift: int = 0
    dilation: int = 1
    centred: bool = False

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of windows of one phase per column and per row of the padded map."""
        height, width = (-(-side // (part * self.dilation)) for side, part in zip(self.size, self.window, strict=True))
        return height, width

    @property
    def padded(self) -> tuple[int, int]:
        """Size of the padded map, (H', W')."""
        height, width = (n * part * self.dilation for n, part in zip(self.counts, self.window, strict=True))
        return height, width

    @property
    def before(self) -> tuple[int, int]:
        """Rows and columns of padding above and on the left."""
        (height, width), (rows, columns) = self.padded, self.size
        return ((height - rows) // 2, (width - columns) // 2) if self.centred else (0, 0)

    def partition(self, x: Tensor) -> Tensor:
        """Cuts tokens (B, H W, C) into windows (B n, h w, C), ordered by image, then row by row."""
        plane: Tensor = x.unflatten(1, self.size)
        if self.padded != self.size:
            above, left = self.before
            below, right = self.padded[0] - self.size[0] - above, self.padded[1] - self.size[1] - left
            plane = F.pad(plane, (0, 0, left, right, above, below))
        if self.shift:
            plane = plane.roll((-self.shift, -self.shift), (1, 2))
        (height, width), phases = self.window, self.dilation
        parts: Tensor = plane.unflatten(2, (-1, width, phases)).unflatten(1, (-1, height, phases))
        return parts.permute(0, 1, 4, 3, 6, 2, 5, 7).flatten(5, 6).flatten(0, 4)  # (B, H'/rh, W'/rw, r, r, h, w, C)

    def reverse(self, windows: Tensor) -> Tensor:
        """Joins windows (B n, h w, C) to tokens (B, H W, C) and removes the padding."""
        parts: Tensor = windows.unflatten(1, self.window)
        parts = parts.unflatten(0, (-1, *self.counts, self.dilation, self.dilation))  # (B, ., ., r, r, h, w, C)
        plane = parts.permute(0, 1, 5, 3, 2, 6, 4, 7).flatten(4, 6).flatten(1, 3)  # (B, H', W', C)
        if self.shift:
            plane = plane.roll((self.shift, self.shift), (1, 2))
        above, left = self.before
        return plane[:, above : above + self.size[0], left : left + self.size[1]].flatten(1, 2)

    def apart(self, device: torch.device) -> Tensor:
        """Returns a mask of the pairs of tokens in a window from opposite sides of the map, (n, 1, h w, h w)."""
        rows, columns = (torch.arange(side, device=device) >= side - self.shift for side in self.padded)
        regions = 2 * rows[:, None] + columns  # (H', W'): only the last windows have more than one region
        regions = self._replace(size=self.padded, shift=0).partition(regions.view(1, -1, 1))  # (n, h w, 1)
        return (regions != regions.mT)[:, None]


class WindowAttention(AttentionLayer):
    """Any registered mechanism inside windows, (B, N, C) -> (B, N, C) on a map of any size.

    The map is zero-padded on the right and at the bottom to a multiple of the window, and these tokens are keys like
    any other, as in the reference for dense prediction. A norm after the output projection (`bn2d`) also includes
    them. A stem is applied to the map before it is cut. A map whose smaller side is not larger than the window has
    windows of that side and no shift, as in the reference for classification, unless `shrink` is False.

    A mechanism that accepts a bias gets a learnable bias for each relative position in the window (`rel_pos_bias`), and
    under the shift a mask between tokens that are not neighbours in the map: -10,000, whose exponential is 0. (The
    exponential of the reference's -100 is a denormal number, which slows down a CPU many times.) Other mechanisms get
    neither, as the reference's focused blocks: under the shift, their border windows mix tokens of opposite sides
    of the map.

    Args:
        grid: Nominal grid of the map.
        window: Side of the windows, at most the smaller side of the nominal grid; None is the whole map of
            any size.
        shifted: Roll the map by half a window first.
        dilation: Distance of a window's tokens in rows and columns. With 2, the pixels at each of the four positions of
            2 x 2 form a window, as in MobileViTv2's separable attention (on the whole map).
        rel_pos_bias: Bias of relative positions, for a mechanism that accepts one; "decomposed" is ViTDet's.
        shrink: False pads a map that is smaller than the window, as ViTDet does.
        options: Further options of `AttentionLayer`, such as `attention` and `qkv_bias`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        window: int | None = 7,
        shifted: bool = False,
        dilation: int = 1,
        rel_pos_bias: bool | Literal["decomposed"] = True,
        shrink: bool = True,
        **options: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in (*NOT_KEPT, "options")}
        if window is not None and window < 1:
            raise UserError(f"a window has a side of at least 1, such as 7, or null for the whole map; got {window}")
        check_number("dilation", dilation, at_least=1, whole=True)
        phase = dilated(grid.size, dilation)
        nominal = phase if window is None else square(window, phase) if shrink else (window, window)
        super().__init__(dim, num_heads, Grid(nominal), **options)
        self.like = partial(WindowAttention, **arguments, **{k: v for k, v in options.items() if k not in NOT_KEPT})
        self.whole_map = window is None
        self.exports_any_size = self.whole_map and dilation == 1  # padding, shift and window depend on the map
        self.window, self.shrink = nominal, shrink
        self.shifted = shifted
        self.dilation = dilation
        if rel_pos_bias and self.mechanism.host.accepts_bias:
            self.add_positions(rel_pos_bias, nominal)

    def forward(self, x: Tensor, grid: Grid | Packed) -> Tensor:  # type: ignore[override]  # windows have their own mask
        """(B, N, C) -> (B, N, C)."""
        if isinstance(grid, Packed):
            return grid.map_images(self.forward, x)
        windows = self.windows(grid.size)
        parts = windows.partition(x if self.stem is None else self.stem(x, grid))
        inputs = parts if self.stem is None else windows.partition(x)
        out = self.mix(parts, Grid(windows.window), self.mask(windows, x.shape[0]))
        return windows.reverse(self.project(out, inputs))

    def size_in_checkpoint(self, count: int, size_of: SizeOf) -> tuple[int, int] | None:
        """Returns the window with this number of tokens in a checkpoint: square, unless it is the whole map."""
        if not self.whole_map:
            return grid_from_count(count, (1, 1))
        size = size_of(count * self.dilation**2)
        return None if size is None else dilated(size, self.dilation)

    def windows(self, size: tuple[int, int]) -> Windows:
        """Returns the windows of a map (H, W)."""
        phase = dilated(size, self.dilation)
        window = phase if self.whole_map else square(self.window[0], phase) if self.shrink else self.window
        fits = min(phase) <= window[0]
        shift = 0 if fits or not self.shifted else self.dilation * (window[0] // 2)
        return Windows(size, window, shift, self.dilation)

    def layout(self, size: tuple[int, int]) -> Tensor:
        """Returns the patch of a map (H, W) at each position of each window, (n, h w); -1 for padding."""
        patches = torch.arange(1, size[0] * size[1] + 1).view(1, -1, 1)
        return self.windows(size).partition(patches).squeeze(-1) - 1

    def mask(self, windows: Windows, batch: int) -> Tensor | None:
        """Returns the mask of a shift, (B n, h, h w, h w): `MASK_VALUE` between opposite sides of the map, else 0."""
        if not (windows.shift and self.mechanism.host.accepts_bias):
            return None
        apart = windows.apart(self.proj.weight.device).to(self.proj.weight.dtype)  # (n, 1, h w, h w)
        return (MASK_VALUE * apart).repeat(batch, 1, 1, 1).expand(-1, self.mechanism.num_heads, -1, -1)


def dilated(size: tuple[int, int], dilation: int) -> tuple[int, int]:
    """Returns the numbers of rows and columns of a map at one phase of `dilation`, rounded up."""
    return -(-size[0] // dilation), -(-size[1] // dilation)


def square(side: int, size: tuple[int, int]) -> tuple[int, int]:
    """Returns a square window of this side, or of the map's smaller side if that is smaller."""
    side = min(side, *size)
    return side, side
