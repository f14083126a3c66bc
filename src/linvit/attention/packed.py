"""Positions of the tokens of images of several sizes in one row, without padding.

Sums over the tokens of each image and convolutions take as many calls as those of images of one size: the row is cut
into chunks that one product of a batch sums, and its patches are put on one plane with zeros between the images, or
into the windows of all images.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.grid import Grid
from linvit.attention.ops.decorators import supports_custom_autograd
from linvit.attention.ops.functional import upcast
from linvit.errors import UserError

CHUNK = 64
"""Tokens of a chunk; the last one of an image is filled up."""
SPARSE = 4
"""Places of a plane per token from which on images are convolved size by size."""


class Packed:
    """Positions of the tokens of images of several sizes in one row, (1, T, C), without padding.

    Images of equal size are side by side, in the order in which they are given, and are one group: its part of the
    row is a view (n, N, C) of n images of one `Grid`. What works token by token is called with the whole row. What
    mixes tokens takes the sums of chunks (`cut`, `add_up`), one plane (`map_patches`) or windows (`windows`), or is
    called with each group (`map_images`).

    Args:
        sizes: Patch grid (H, W) of each image.
        num_prefix: Class and register tokens before the patch tokens of each image.

    Attributes:
        order: Numbers of the images in the order of the row.
        groups: For each group the `Grid` of its images and their number n.
        lengths: Tokens of each image, prefix included, in the order of the row.

    Example:
        >>> packed = Packed([(4, 4), (2, 3), (4, 4)], num_prefix=1)
        >>> packed.order, packed.lengths, packed.offsets
        ((1, 0, 2), (7, 17, 17), (0, 7, 24, 41))
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], num_prefix: int = 0) -> None:
        if not sizes:
            raise UserError("a pack needs at least one image; got none")
        self.sizes = [(int(height), int(width)) for height, width in sizes]
        self.num_prefix = num_prefix
        self.groups = [(Grid(size, num_prefix=num_prefix), n) for size, n in sorted(Counter(self.sizes).items())]
        for grid, _ in self.groups:
            grid.check()
        self.order = tuple(sorted(range(len(sizes)), key=self.sizes.__getitem__))
        self._sizes = sorted(self.sizes)  # in the order of the row
        self.lengths = tuple(grid.num_queries for grid, n in self.groups for _ in range(n))
        self._parts = [grid.num_queries * n for grid, n in self.groups]
        self._kept: dict[Hashable, Any] = {}

    def __repr__(self) -> str:
        return f"Packed({self.sizes}, num_prefix={self.num_prefix})"

    @property
    def num_queries(self) -> int:
        """Tokens T of all images."""
        return sum(self._parts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Places where the images begin in the row, and T."""
        return tuple(accumulate(self.lengths, initial=0))

    def split(self, x: Tensor) -> list[Tensor]:
        """Returns each group's part of a row, as views: (1, T, C) as (n, N, C), or (1, h, T, d) as (n, h, N, d)."""
        rows = x.split(self._parts, -2)  # one node of autograd: slices would each have a gradient of all T tokens
        counted = zip(rows, self.groups, strict=True)
        if x.ndim == 3:
            return [row[0].unflatten(0, (n, -1)) for row, (_, n) in counted]
        return [row[0].unflatten(1, (n, -1)).transpose(0, 1) for row, (_, n) in counted]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins parts of groups to a row: (n, N, C) to (1, T, C), or (n, h, N, d) to (1, h, T, d)."""
        if parts[0].ndim == 3:
            return torch.cat([part.flatten(0, 1) for part in parts])[None]
        return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])[None].transpose(1, 2)

    def map_images(self, change: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Calls `change(*parts, grid)` with each group's parts of some rows, and joins what it returns."""
        parts = zip(*map(self.split, rows), strict=True)
        return self.join([change(*part, grid) for part, (grid, _) in zip(parts, self.groups, strict=True)])

    def map_patches(self, change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Applies a convolution of planes to the patches of each image of a row (1, T, C); see `Grid.map_patches`.

        `change` keeps the size of a plane, pads it with zeros, and mixes patches that are neighbours.
        """
        out = self.convolve(change, x, 1)
        if self.num_prefix:
            prefix = self.prefix(x.device)
            out = out.index_copy(1, prefix, x.index_select(1, prefix))
        return out

    def convolve(self, change: Callable[[Tensor], Tensor], x: Tensor, reach: int) -> Tensor:
        """Applies a convolution of planes to the patches of a row (1, T, C); 0 for prefix tokens.

        All images lie on one plane, so far apart that `change`, which mixes patches at most `reach` apart, mixes none.
        If most of the plane would be empty, as with a very wide and a very high image, images of each size are a batch.
        """
        if math.prod(self._shelves(reach)[1]) > SPARSE * self.num_queries:
            parts = zip(x.split(self._parts, 1), self.groups, strict=True)
            return torch.cat([_convolved(change, part, grid, n) for part, (grid, n) in parts], 1)
        layout = self._layout(reach, x.device)
        plane = move(x, layout).mT.unflatten(2, layout.shape)  # (1, C, H, W)
        return move(change(plane).flatten(2).mT, layout.turned())

    def convolve_sequence(self, change: Callable[[Tensor], Tensor], x: Tensor, reach: int) -> Tensor:
        """Applies a convolution along the tokens of each image, prefix included, to a row (1, h, T, d)."""
        layout = self._rooms(("sequence", reach), x.device, lambda lengths: lengths + reach)
        return move(change(move(x[0], layout)[None])[0], layout.turned())[None]

    def cut(self, x: Tensor, zeros: bool = True) -> Tensor:
        """Cuts a row (1, h, T, d) into chunks (h, n, c, d), filled up with zeros, or with the image's last token."""
        layout = self._chunks(x.device)
        layout = layout if zeros else layout._replace(empty=layout.empty[:0])
        cut: Tensor = move(x[0], layout).unflatten(1, (-1, CHUNK))
        return cut

    def uncut(self, x: Tensor) -> Tensor:
        """Joins chunks (h, n, c, d) to a row (1, h, T, d)."""
        return move(x.flatten(1, 2), self._chunks(x.device).turned())[None]

    def add_up(self, x: Tensor) -> Tensor:
        """Replaces sums over chunks, (h, n, ...), by the sums over all chunks of their images, (h, n, ...)."""
        return self.image_sums(x).index_select(1, self.images(x.device))

    def image_sums(self, x: Tensor) -> Tensor:
        """Adds up sums over chunks, (h, n, ...), for each image in the order of the row, (h, B, ...)."""
        return x.new_zeros(len(x), len(self.lengths), *x.shape[2:]).index_add(1, self.images(x.device), x)

    def means(self, x: Tensor, prefix: bool = True) -> Tensor:
        """Means over the tokens, or the patches alone, of each image of a row (1, T, C), (B, C) in its order."""
        own = x if prefix else x.index_fill(1, self.prefix(x.device), 0)
        sums = self.image_sums(self.cut(upcast(own)[:, None]).sum(-2))[0]
        counts = torch.tensor(self.lengths) - (0 if prefix else self.num_prefix)
        return (sums / counts[:, None].to(sums)).to(x.dtype)

    def images(self, device: torch.device) -> Tensor:
        """Returns the image of each chunk, (n,)."""

        def made() -> Tensor:
            counts = -(-torch.tensor(self.lengths) // CHUNK)
            return torch.arange(len(counts)).repeat_interleave(counts).to(device)

        return self.kept(("image", device), made)  # type: ignore[no-any-return]

    def prefix(self, device: torch.device) -> Tensor:
        """Returns the places of the prefix tokens in the row, image by image, (B p,)."""

        def made() -> Tensor:
            starts = torch.tensor(self.offsets[:-1])[:, None]
            return (starts + torch.arange(self.num_prefix)).flatten().to(device)

        return self.kept(("prefix", device), made)  # type: ignore[no-any-return]

    def counts(self, like: Tensor) -> Tensor:
        """Returns for each token the number of tokens of its image, (T, 1)."""

        def made() -> Tensor:
            lengths = torch.tensor(self.lengths)
            return lengths.repeat_interleave(lengths)[:, None].to(like)

        return self.kept(("counts", like.dtype, like.device), made)  # type: ignore[no-any-return]

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns what `make` made for this key the first time, such as a table that all layers share."""
        if key not in self._kept:
            with torch.inference_mode(False):  # training may be next
                self._kept[key] = make()
        return self._kept[key]

    def _chunks(self, device: torch.device) -> "_Layout":
        """Returns the places of the tokens in the chunks."""
        return self._rooms("chunks", device, lambda lengths: -(-lengths // CHUNK) * CHUNK)

    def _rooms(self, name: Hashable, device: torch.device, room: Callable[[Tensor], Tensor]) -> "_Layout":
        """Returns the places of the tokens in a row with `room` places for images of lengths (B,), from the first."""

        def made() -> _Layout:
            lengths = torch.tensor(self.lengths)
            rooms = room(lengths)
            shifts = (rooms.cumsum(0) - rooms) - (lengths.cumsum(0) - lengths)
            places = torch.arange(self.num_queries) + shifts.repeat_interleave(lengths)
            return _Layout.of(places, (int(rooms.sum()),), device)

        return self.kept((name, device), made)  # type: ignore[no-any-return]

    def _layout(self, gap: int, device: torch.device) -> "_Layout":
        """Returns the places of the patches on a plane with `gap` empty patches between images, on shelves."""

        def made() -> _Layout:
            corners, shape = self._shelves(gap)
            image, row, column = self._patches()
            top, left = torch.tensor(corners)[image].T
            places = (top + row) * shape[1] + left + column
            return _Layout.of(places.where(row >= 0, -1), shape, device)

        return self.kept(("plane", gap, device), made)  # type: ignore[no-any-return]

    def _shelves(self, gap: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Returns the corner of each image on the plane, and the plane's height and width."""

        def made() -> tuple[list[tuple[int, int]], tuple[int, int]]:
            room = max(max(width for _, width in self._sizes), math.isqrt(sum(h * w for h, w in self._sizes)))
            x = y = height = 0
            corners = []
            for own_height, own_width in self._sizes:
                if x + own_width > room:
                    x, y, height = 0, y + height + gap, 0
                corners.append((y, x))
                x, height = x + own_width + gap, max(height, own_height)
            return corners, (y + height, room)

        return self.kept(("shelves", gap), made)  # type: ignore[no-any-return]

    def window_counts(self, sides: Sequence[int]) -> list[int]:
        """Returns the number of windows of these sides of each image, in the order of the row."""
        return [-(-height // sides[0]) * -(-width // sides[1]) for height, width in self._sizes]

    def windows(self, sides: Sequence[int], device: torch.device) -> "_Layout":
        """Returns the places of the patches in windows of these sides, one image after the other."""

        def made() -> _Layout:
            (image, row, column), (height, width) = self._patches(), sides
            counts = torch.tensor(self.window_counts(sides))
            window = (counts.cumsum(0) - counts)[image] + row // height * -(
                -torch.tensor(self._sizes)[image, 1] // width
            )
            places = ((window + column // width) * height + row % height) * width + column % width
            return _Layout.of(places.where(row >= 0, -1), (int(counts.sum()) * height * width,), device)

        return self.kept(("windows", tuple(sides), device), made)  # type: ignore[no-any-return]

    def _patches(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the image of each token, and its row and column there, (T,) each; a row below 0 for prefix tokens."""
        lengths = torch.tensor(self.lengths)
        image = torch.arange(len(lengths)).repeat_interleave(lengths)
        patch = torch.arange(self.num_queries) - (lengths.cumsum(0) - lengths)[image] - self.num_prefix
        width = torch.tensor(self._sizes)[image, 1]
        return image, patch // width, patch % width

    def table(self, of_grid: Callable[[Grid], Tensor]) -> Tensor:
        """Joins what a table (1, N, C) is on the grid of each image to a row (1, T, C)."""
        return self.join([of_grid(grid).expand(n, -1, -1) for grid, n in self.groups])

    def spread(self, values: Tensor) -> Tensor:
        """Repeats a value (B, C) of each image, in the order in which they were given, for its tokens: (1, T, C)."""
        lengths = torch.tensor(self.lengths, device=values.device)
        return values[list(self.order)].repeat_interleave(lengths, 0, output_size=self.num_queries)[None]

    def restore(self, values: Tensor) -> Tensor:
        """Brings values (B, ...) in the order of the row into the order in which the images were given."""
        return values[sorted(range(len(self.order)), key=self.order.__getitem__)]


def _convolved(change: Callable[[Tensor], Tensor], x: Tensor, grid: Grid, number: int) -> Tensor:
    """Applies a convolution of planes to the patches of a number of images of one size, (b, n N, C)."""
    plane = grid.plane(x.unflatten(1, (number, -1)).flatten(0, 1))
    patches = F.pad(change(plane).flatten(2).mT, (0, 0, grid.num_prefix, 0))
    return patches.unflatten(0, (-1, number)).flatten(1, 2)  # type: ignore[no-any-return]


class _Layout(NamedTuple):
    """Places of tokens in another order: the token at each place and the place of each token, or any where empty."""

    there: Tensor
    empty: Tensor
    back: Tensor
    empty_back: Tensor
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, places: Tensor, shape: tuple[int, ...], device: torch.device) -> "_Layout":
        """Returns the layout of tokens at `places` (T), -1 for none, among as many as `shape` has."""
        there = torch.full((math.prod(shape),), -1)
        tokens = (places >= 0).nonzero()[:, 0]
        there[places[tokens]] = tokens
        last = there.where(there >= 0, there.cummax(0).values.clamp_min(0))  # in a chunk a token of the same image
        both = [last, (there < 0).nonzero()[:, 0], places.clamp_min(0), (places < 0).nonzero()[:, 0]]
        there, empty, back, empty_back = (part.to(device) for part in both)
        return cls(there, empty, back, empty_back, shape)

    def turned(self) -> "_Layout":
        """Returns the way back."""
        return _Layout(self.back, self.empty_back, self.there, self.empty)


def move(x: Tensor, layout: _Layout) -> Tensor:
    """Brings rows of (h, T, d) to their places, (h, n, d); 0 where none is."""
    if supports_custom_autograd(x):
        return _Moved.apply(x, *layout[:4])  # type: ignore[no-any-return]
    return _Moved.forward(None, x, *layout[:4])


class _Moved(torch.autograd.Function):
    """`_move`. Its gradient moves rows, too, which is many times as fast as adding rows up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *layout: Tensor) -> Tensor:
        there, empty, *_ = layout
        if ctx is not None:
            ctx.save_for_backward(*layout)
        return x.index_select(1, there).index_fill_(1, empty, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        there, empty, back, empty_back = ctx.saved_tensors
        return move(gradient, _Layout(back, empty_back, there, empty)), None, None, None, None
