"""FLatten-Swin."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from authors.focused import Focused
from authors.layers import Mlp, Patches


class WindowSoftmax(nn.Module):
    """Swin's `WindowAttention`, (B n, N, C) -> (B n, N, C)."""

    def __init__(self, dim: int, side: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        row, column = (torch.arange(side**2) // side, torch.arange(side**2) % side)
        rows, columns = (axis[:, None] - axis + side - 1 for axis in (row, column))
        self.register_buffer("relative_position_index", rows * (2 * side - 1) + columns)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """With the mask (n, N, N) of shifted windows."""
        count, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        logits = q * self.scale @ k.mT
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        logits = logits + bias.view(tokens, tokens, -1).permute(2, 0, 1).contiguous()
        if mask is not None:
            logits = logits.view(-1, len(mask), self.heads, tokens, tokens) + mask[:, None]
            logits = logits.view(-1, self.heads, tokens, tokens)
        projected: Tensor = self.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return projected


class SwinBlock(nn.Module):
    """Swin's block; windows as large as the map are not shifted."""

    def __init__(
        self,
        dim: int,
        size: tuple[int, int],
        heads: int,
        window: int,
        shift: bool,
        focused: bool,
        hidden: int,
        eps: float,
    ) -> None:
        super().__init__()
        fits = min(size) <= window
        self.size, self.window, self.shift = size, min(window, *size), 0 if fits or not shift else window // 2
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        side = self.window
        self.attn = Focused(dim, (side, side), heads) if focused else WindowSoftmax(dim, side, heads)
        self.mlp = Mlp(dim, hidden)
        self.register_buffer("attn_mask", self._mask() if self.shift else None)

    def _mask(self) -> Tensor:
        """-100 between tokens of one window that are no neighbours in the map, (n, N, N)."""
        rows, columns = (
            (torch.arange(side) >= side - self.window).long() + (torch.arange(side) >= side - self.shift)
            for side in self.size
        )
        regions = self._partition((3 * rows[:, None] + columns).view(1, *self.size, 1))  # (n, N, 1)
        return -100.0 * (regions != regions.mT)

    def _partition(self, plane: Tensor) -> Tensor:
        (height, width), side = self.size, self.window
        parts = plane.view(-1, height // side, side, width // side, side, plane.shape[-1])
        return parts.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, side**2, plane.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        (height, width), side = self.size, self.window
        plane = self.norm1(x).view(-1, height, width, x.shape[-1])
        if self.shift:
            plane = plane.roll((-self.shift, -self.shift), (1, 2))
        windows = self.attn(self._partition(plane), self.attn_mask)
        parts = windows.view(-1, height // side, width // side, side, side, x.shape[-1])
        plane = parts.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, height, width, x.shape[-1])
        if self.shift:
            plane = plane.roll((self.shift, self.shift), (1, 2))
        x = x + plane.view(x.shape)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Merging(nn.Module):
    """Swin's patch merging, (B, N, C) -> (B, N / 4, 2 C)."""

    def __init__(self, dim: int, size: tuple[int, int], eps: float) -> None:
        super().__init__()
        self.size = size
        self.norm, self.reduction = nn.LayerNorm(4 * dim, eps), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N / 4, 2 C)."""
        plane = x.view(-1, *self.size, x.shape[-1])
        parts = [plane[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        out: Tensor = self.reduction(self.norm(torch.cat(parts, -1).view(len(x), -1, 4 * x.shape[-1])))
        return out


class SwinStage(nn.Module):
    """Blocks, and the merging at their end."""

    def __init__(self, blocks: Sequence[nn.Module], downsample: nn.Module | None) -> None:
        super().__init__()
        self.blocks, self.downsample = nn.Sequential(*blocks), downsample

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N', C')."""
        x = self.blocks(x)
        return x if self.downsample is None else self.downsample(x)  # type: ignore[no-any-return]


class FlattenSwin(nn.Module):
    """FLatten-Swin; `window` is that of the focused stages."""

    def __init__(
        self,
        size: tuple[int, int] = (224, 224),
        classes: int = 1000,
        dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24),
        window: int = 56,
        ratio: float = 4.0,
        focused: str = "LLSS",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.patch_embed = Patches(3, dim, 4)
        if eps != 1e-5:
            self.patch_embed.norm = nn.LayerNorm(dim, eps)
        stages = []
        for i, depth in enumerate(depths):
            grid, width = (size[0] // 2 ** (i + 2), size[1] // 2 ** (i + 2)), dim * 2**i
            linear = focused[i] == "L"
            side = window if linear else 7
            blocks = [
                SwinBlock(width, grid, heads[i], side, j % 2 == 1, linear, int(width * ratio), eps)
                for j in range(depth)
            ]
            stages.append(SwinStage(blocks, Merging(width, grid, eps) if i < len(depths) - 1 else None))
        self.layers = nn.Sequential(*stages)
        self.norm, self.head = nn.LayerNorm(width, eps), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, classes)."""
        logits: Tensor = self.head(self.norm(self.layers(self.patch_embed(x))).mean(1))
        return logits
