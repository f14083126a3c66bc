"""Near keys: those of windows, neighbourhoods or selected blocks; softmax over them, and sums over the others.

Windows have w x w patches from the upper left corner; those at the right and lower edge are smaller. Prefix tokens are
keys of every window, and a prefix query sees all keys.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.ops.functional import is_exporting
from linvit.attention.ops.orders import chunked
from linvit.attention.packed import Packed, move


class Windows:
    """The n windows of a grid with L places each; places beyond the edge of the grid hold no token.

    Args:
        grid: The grid of queries and keys.
        side: Side w of the windows.
    """

    def __init__(self, grid: Grid, side: int) -> None:
        self.grid, self.prefix = grid, grid.num_prefix
        self.sides = tuple(side if is_exporting() else min(side, length) for length in grid.size)
        self.counts = tuple((length + own - 1) // own for length, own in zip(grid.size, self.sides, strict=True))
        self.missing = tuple(
            count * own - length for count, own, length in zip(self.counts, self.sides, grid.size, strict=True)
        )

    @property
    def number(self) -> int:
        """Number n of windows."""
        return self.counts[0] * self.counts[1]

    def split(self, x: Tensor) -> Tensor:
        """Returns patches of (B, h, N, d) by window, (B, n, h, L, d); zeros where no token is."""
        plane = x[:, :, self.prefix :].unflatten(2, self.grid.size)
        if is_exporting() or any(self.missing):
            plane = F.pad(plane, (0, 0, 0, self.missing[1], 0, self.missing[0]))
        cells = plane.unflatten(3, (self.counts[1], self.sides[1])).unflatten(2, (self.counts[0], self.sides[0]))
        return cells.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(1, 2)  # type: ignore[no-any-return]

    def join(self, x: Tensor) -> Tensor:
        """Returns the inverse of `split`, without prefix tokens: (B, n, h, L, d) -> (B, h, P, d)."""
        cells = x.unflatten(3, self.sides).unflatten(1, self.counts).permute(0, 3, 1, 4, 2, 5, 6)
        plane = cells.flatten(4, 5).flatten(2, 3)
        return plane[:, :, : self.grid.size[0], : self.grid.size[1]].flatten(2, 3)  # type: ignore[no-any-return]

    def kept(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """True for the keys of each window that take part, (B or 1, n, 1, 1, p + L); None if all do.

        Keys of a window are the prefix tokens, then its patches. `mask` is (B, N).
        """
        if mask is None and not is_exporting() and not any(self.missing):
            return None
        if mask is None:
            mask = like.new_ones(1, like.shape[2], dtype=torch.bool)
        patches = self.split(mask[:, None, :, None].to(like.dtype)).mT > 0  # (B, n, 1, 1, L)
        front = mask[:, None, None, None, : self.prefix].expand(-1, patches.shape[1], -1, -1, -1)
        return torch.cat([front, patches], -1)

    def with_prefix(self, x: Tensor) -> Tensor:
        """Returns keys of each window: the prefix tokens of (B, h, N, d), then its patches, (B, n, h, p + L, d)."""
        patches = self.split(x)
        if not self.prefix:
            return patches
        front = x[:, None, :, : self.prefix].expand(-1, patches.shape[1], -1, -1, -1)
        return torch.cat([front, patches], 3)

    def beyond(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q (k^T v)` over the patches of all other windows, (B, n, h, L, d), of features and values (B, h, N, ...)."""
        return self.split(q) @ sum_of_others(self.split(k).mT @ self.split(v))

    def complete(
        self, patches: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
    ) -> Tensor:
        """Returns joined outputs of patches and those of prefix tokens, softmax over all keys, (B, h, N, d)."""
        if not self.prefix:
            return patches
        front = masked_softmax(q[:, :, : self.prefix], k, v, None if mask is None else mask[:, None, None], scale)
        return torch.cat([front, patches], 2)


class PackedWindows(Windows):
    """The n windows of all images of a pack. `join` gives rows, with zeros for prefix tokens."""

    def __init__(self, grid: Packed, side: int) -> None:
        self.pack, self.prefix, self.side = grid, 0, side
        self.sides = tuple(min(side, max(lengths)) for lengths in zip(*grid.sizes, strict=True))

    @property
    def number(self) -> int:
        """Number n of windows."""
        return sum(self.pack.window_counts(self.sides))

    def split(self, x: Tensor) -> Tensor:
        """Returns patches of (1, h, T, d) by window, (1, n, h, L, d); zeros where no token is."""
        windows = move(x[0], self.pack.windows(self.sides, x.device))  # (h, n L, d)
        return windows.unflatten(1, (self.number, -1)).transpose(0, 1)[None]  # type: ignore[no-any-return]

    def join(self, x: Tensor) -> Tensor:
        """Returns the inverse of `split`, (1, n, h, L, d) -> (1, h, T, d)."""
        return move(x[0].transpose(0, 1).flatten(1, 2), self.pack.windows(self.sides, x.device).turned())[None]

    def kept(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """True for the keys of each window that are tokens, (1, n, 1, 1, p + L); a pack has no mask."""
        ones = like.new_ones(1, 1, like.shape[2], 1)
        return self.pack.kept(("kept", self.sides, like.device), lambda: self.with_prefix(ones).mT > 0)  # type: ignore[no-any-return]

    def with_prefix(self, x: Tensor) -> Tensor:
        """Returns keys of each window: the prefix tokens of its image, then its patches, (1, n, h, p + L, d)."""
        patches, prefix = self.split(x), self.pack.num_prefix
        if not prefix:
            return patches
        images = x[0].index_select(1, self.pack.prefix(x.device)).unflatten(1, (-1, prefix)).transpose(0, 1)
        counts = torch.tensor(self.pack.window_counts(self.sides), device=x.device)
        return torch.cat([images.repeat_interleave(counts, 0, output_size=self.number)[None], patches], 3)

    def beyond(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q (k^T v)` over the patches of all other windows of the image, (1, n, h, L, d); see `Windows`."""
        states = (self.split(k).mT @ self.split(v)).split(self.pack.window_counts(self.sides), 1)  # image by image
        return self.split(q) @ torch.cat([sum_of_others(own) for own in states], 1)

    def complete(
        self, patches: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
    ) -> Tensor:
        """Returns joined outputs of patches and those of prefix tokens, softmax over the image's keys, (1, h, T, d)."""
        prefix = self.pack.num_prefix

        def front(q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
            return F.pad(masked_softmax(q[:, :, :prefix], k, v, None, scale), (0, 0, 0, grid.num_queries - prefix))

        return patches + self.pack.map_images(front, q, k, v) if prefix else patches


def windows_of(grid: Grid | Packed, side: int) -> Windows:
    """Returns the windows of an image, or of packed images."""
    return PackedWindows(grid, side) if isinstance(grid, Packed) else Windows(grid, side)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: Windows, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Returns softmax over the keys of the query's window, (B, h, N, dk), (B, h, N, dk), (B, h, N, d) -> (B, h, N, d).

    Queries without any key get zeros.
    """
    if isinstance(windows, PackedWindows) and windows.number * math.prod(windows.sides) > 3 * q.shape[2]:
        side = windows.side  # most places of the windows would be empty, so size by size
        return windows.pack.map_images(
            lambda q, k, v, own: window_attention(q, k, v, Windows(own, side), scale), q, k, v
        )
    kept = windows.kept(mask, q)
    if kept is not None:
        kept = kept.expand(q.shape[0], -1, -1, -1, -1).flatten(0, 1)
    queries, keys, values = (
        x.flatten(0, 1) for x in (windows.split(q), windows.with_prefix(k), windows.with_prefix(v))
    )
    out = masked_softmax(queries, keys, values, kept, scale).unflatten(0, (q.shape[0], windows.number))
    return windows.complete(windows.join(out), q, k, v, scale, mask)


def masked_softmax(q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None, scale: float) -> Tensor:
    """Returns softmax attention over the keys that are `kept`, (B or 1, 1, 1, M); zeros where none is."""
    if kept is not None:
        none = ~kept.any(-1, keepdim=True)
        kept = kept | none  # a row of logits that are all -inf is NaN on some devices
        v = v if v.shape[0] == 0 else v.masked_fill(none.mT, 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=kept, scale=scale).to(v.dtype)


def sum_of_others(x: Tensor) -> Tensor:
    """Returns for each entry of dimension 1 the sum of all others, without a subtraction and its rounding errors."""
    nothing = torch.zeros_like(x[:, :1])
    before = torch.cat([nothing, x[:, :-1].cumsum(1)], 1)
    behind = torch.cat([nothing, x[:, 1:].flip(1).cumsum(1)], 1).flip(1)
    return before + behind


class Neighbourhoods(Windows):
    """The neighbourhood of each patch, at most w // 2 rows and columns away, as P windows of one query.

    Args:
        grid: The grid of queries and keys.
        side: Side w of the neighbourhoods, odd.
    """

    def __init__(self, grid: Grid, side: int) -> None:
        self.grid, self.prefix, self.side = grid, grid.num_prefix, side

    def split(self, x: Tensor) -> Tensor:
        """Returns patches of (B, h, N, d) one by one, (B, P, h, 1, d)."""
        return x[:, :, self.prefix :].transpose(1, 2).unsqueeze(3)

    def join(self, x: Tensor) -> Tensor:
        """Returns the inverse of `split`: (B, P, h, 1, d) -> (B, h, P, d)."""
        return x.squeeze(3).transpose(1, 2)

    def around(self, x: Tensor) -> Tensor:
        """Returns neighbours of each patch of (B, h, N, d), (B, P, h, w^2, d); zeros beyond the edge of the grid."""
        plane = x[:, :, self.prefix :].mT.flatten(1, 2).unflatten(2, self.grid.size)  # (B, h d, H, W)
        shifted = F.unfold(plane, self.side, padding=self.side // 2)  # (B, h d w^2, P)
        return shifted.unflatten(1, (x.shape[1], x.shape[3], self.side**2)).permute(0, 4, 1, 3, 2)  # type: ignore[no-any-return]

    def kept(self, mask: Tensor | None, like: Tensor) -> Tensor:
        """True for the neighbours that take part, (B or 1, P, 1, 1, p + w^2); `mask` is (B, N)."""
        tokens = like.new_ones(1, like.shape[2]) if mask is None else mask.to(like.dtype)
        patches = self.around(tokens[:, None, :, None]).mT > 0
        front = tokens[:, None, None, None, : self.prefix].expand(-1, patches.shape[1], -1, -1, -1) > 0
        return torch.cat([front, patches], -1)

    def with_prefix(self, x: Tensor) -> Tensor:
        """Returns keys of each patch: the prefix tokens of (B, h, N, d), then its neighbours, (B, P, h, p + w^2, d)."""
        patches = self.around(x)
        front = x[:, None, :, : self.prefix].expand(-1, patches.shape[1], -1, -1, -1)
        return torch.cat([front, patches], 3)

    def beyond(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q (k^T v)` over all patches but the neighbours, (B, P, h, 1, d), of features and values (B, h, N, ...)."""
        queries, all_keys, all_values = self.split(q), k[:, :, self.prefix :], v[:, :, self.prefix :]
        return queries @ (all_keys.mT @ all_values)[:, None] - queries @ self.around(k).mT @ self.around(v)


class SelectedBlocks(Windows):
    """Blocks of queries in the order of the sequence, each with the blocks of keys whose mean suits its mean best.

    Args:
        grid: The grid of queries and keys.
        q: Queries (B, h, N, dk).
        k: Keys (B, h, N, dk).
        share: Share of the blocks of keys that a block of queries selects, rounded down to at least one.
        sizes: Tokens of a block of queries, and of keys.
        mask: True for the tokens that take part, (B, N); None means all.
    """

    def __init__(
        self, grid: Grid, q: Tensor, k: Tensor, share: float, sizes: Sequence[int], mask: Tensor | None = None
    ) -> None:
        self.grid, self.prefix, self.sizes = grid, grid.num_prefix, sizes
        tokens = q.new_ones(1, 1, q.shape[2], 1) if mask is None else mask[:, None, :, None].to(q.dtype)
        rows, columns, kept = (x[:, :, self.prefix :].detach() for x in (q * tokens, k * tokens, tokens))
        sums, key_sums, counts = (
            chunked(x, size).sum(3) for x, size in ((rows, sizes[0]), (columns, sizes[1]), (kept, sizes[1]))
        )
        scores = (sums @ (key_sums / counts.clamp_min(1)).mT).masked_fill(counts.mT == 0, -torch.inf)
        self.chosen = scores.topk(max(int(share * scores.shape[3]), 1)).indices  # (B, h, n, selected)
        self.others = torch.ones_like(scores).scatter(3, self.chosen, 0)

    @property
    def number(self) -> int:
        """Number n of blocks of queries."""
        return self.chosen.shape[2]

    def split(self, x: Tensor) -> Tensor:
        """Returns patches of (B, h, N, d) by block, (B, n, h, L, d); zeros where no token is."""
        return chunked(x[:, :, self.prefix :], self.sizes[0]).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Returns the inverse of `split`, without prefix tokens: (B, n, h, L, d) -> (B, h, P, d)."""
        return x.transpose(1, 2).flatten(2, 3)[:, :, : self.grid.num_queries - self.prefix]

    def kept(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """True for the keys of each block that take part, (B, n, h, 1, K); None if all do. `mask` is (B, N)."""
        if mask is None and not (like.shape[2] - self.prefix) % self.sizes[1]:
            return None
        tokens = like.new_ones(1, like.shape[2]) if mask is None else mask.to(like.dtype)
        return self.with_prefix(tokens[:, None, :, None].expand(*like.shape[:2], -1, -1)).mT > 0

    def with_prefix(self, x: Tensor) -> Tensor:
        """Returns keys of each block: the prefix tokens of (B, h, N, d), then the selected blocks, (B, n, h, K, d)."""
        blocks = chunked(x[:, :, self.prefix :], self.sizes[1])  # (B, h, m, L, d)
        index = self.chosen.flatten(2)[..., None, None].expand(-1, -1, -1, *blocks.shape[3:])
        near = blocks.gather(2, index).unflatten(2, self.chosen.shape[2:]).flatten(3, 4).transpose(1, 2)
        front = x[:, None, :, : self.prefix].expand(-1, near.shape[1], -1, -1, -1)
        return torch.cat([front, near], 3)

    def beyond(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q (k^T v)` over the blocks that are not selected, (B, n, h, L, d), of features and values (B, h, N, ...)."""
        keys, values = (chunked(x[:, :, self.prefix :], self.sizes[1]) for x in (k, v))
        states = keys.mT @ values  # (B, h, m, dk, d)
        others: Tensor = (self.others @ states.flatten(3)).unflatten(3, states.shape[3:])  # (B, h, n, dk, d)
        return self.split(q) @ others.transpose(1, 2)
