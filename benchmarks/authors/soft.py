"""SOFT."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from authors.layers import Block, Softmax, positions


class Newton(torch.autograd.Function):
    """SOFT's inverse by 20 steps of Newton's iteration, differentiated as the inverse."""

    @staticmethod
    def forward(ctx, kernel: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """(B, h, m, m) -> (B, h, m, m)."""
        alpha = 1.8 / kernel.sum(-1).amax(-1).square()[..., None, None]
        matrix = kernel + 0.01 * torch.eye(kernel.shape[-1], device=kernel.device)
        inverse = alpha * matrix
        for _ in range(20):
            inverse = 2 * inverse - inverse @ matrix @ inverse
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        """`-Y^T dY Y^T` for the inverse Y."""
        (inverse,) = ctx.saved_tensors
        return -inverse.mT @ gradient @ inverse.mT


def gaussian(a: Tensor, b: Tensor) -> Tensor:
    """SOFT's kernel without differences, (..., n, d), (..., m, d) -> (..., n, m)."""
    distance = (a**2).sum(-1, keepdim=True) + (b**2).sum(-1, keepdim=True).mT - 2 * a @ b.mT
    return torch.exp(-distance / 2)


class SoftKernel(nn.Module):
    """SOFT's `SoftmaxFreeAttentionKernel`, on q and v (B, h, N, d)."""

    def __init__(self, dim: int, heads: int, ratio: int, kernel: int) -> None:
        super().__init__()
        width = dim // heads
        self.Qlandmark_op = nn.Conv2d(width, width, ratio, ratio, bias=False)
        self.Qnorm_act = nn.Sequential(nn.LayerNorm(width), nn.GELU())
        self.conv = nn.Conv2d(heads, heads, kernel, padding=kernel // 2, groups=heads, bias=False)

    def forward(self, q: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, h, N, d) of the patches of a map (H, W)."""
        batch, heads, tokens, width = q.shape
        q = q / width**0.25
        plane = q.reshape(batch * heads, *size, width).permute(0, 3, 1, 2)
        landmarks = self.Qnorm_act(self.Qlandmark_op(plane).flatten(2).transpose(1, 2).reshape(batch, heads, -1, width))
        left, inverse = gaussian(q, landmarks), Newton.apply(gaussian(landmarks, landmarks))
        out = left @ inverse @ (left.mT @ v)
        local = self.conv(v.permute(0, 3, 1, 2).reshape(batch * width, heads, *size))
        return out + local.reshape(batch, width, heads, tokens).permute(0, 2, 3, 1)  # type: ignore[no-any-return]


class SoftAttention(nn.Module):
    """Its projections: keys are the queries."""

    def __init__(self, dim: int, heads: int, ratio: int, kernel: int) -> None:
        super().__init__()
        self.heads = heads
        self.W_q, self.W_v, self.ff = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.attn = SoftKernel(dim, heads, ratio, kernel)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        q, v = (
            projection(x).reshape(*x.shape[:2], self.heads, -1).transpose(1, 2).contiguous()
            for projection in (self.W_q, self.W_v)
        )
        out: Tensor = self.ff(self.attn(q, v, size).transpose(1, 2).reshape(x.shape))
        return out


class SoftBlock(nn.Module):
    """SOFT's post-norm block; its feed-forward layer stands in the same module."""

    def __init__(self, dim: int, heads: int, ratio: int, kernel: int) -> None:
        super().__init__()
        self.mha = SoftAttention(dim, heads, ratio, kernel)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff1, self.ff2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = self.norm1(x + self.mha(x, size))
        hidden = self.ff1(x)
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        out: Tensor = self.norm2(x + self.ff2(hidden))
        return out


class SOFT(nn.Module):
    """SOFT: softmax-free in stages 1 to 3, PVT's blocks with a class token in stage 4."""

    def __init__(
        self,
        classes: int = 1000,
        dims: Sequence[int] = (64, 128, 320, 512),
        heads: Sequence[int] = (2, 4, 10, 16),
        depths: Sequence[int] = (1, 2, 3, 2),
        ratio: int = 4,
    ) -> None:
        super().__init__()
        widths = [[3, 32, 32, dims[0]], *map(list, pairwise(dims))]
        for i, dim in enumerate(dims):
            convolutions: list[nn.Module] = []
            for j, (a, b) in enumerate(pairwise(widths[i])):
                stride = 1 if i == 0 and j == 1 else 2
                convolutions += [nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU()]
            blocks = [
                nn.ModuleDict({"att": SoftBlock(dim, heads[i], 8 >> i, (9, 5, 3)[i])})
                if i < 3
                else Block(dim, Softmax(dim, heads[i]), ratio * dim)
                for _ in range(depths[i])
            ]
            table = 0.02 * torch.randn(1, (56 >> i) ** 2 + (i == 3), dim)
            setattr(self, f"patch_embed{i + 1}", nn.ModuleDict({"proj": nn.Sequential(*convolutions)}))
            setattr(self, f"pos_embed{i + 1}", nn.Parameter(table))
            setattr(self, f"block{i + 1}", nn.ModuleList(blocks))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.norm, self.head = nn.LayerNorm(dim, 1e-6), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, classes)."""
        for i in range(4):
            x = getattr(self, f"patch_embed{i + 1}")["proj"](x)
            size, side = x.shape[2:], 56 >> i
            tokens = x.flatten(2).transpose(1, 2)
            table = getattr(self, f"pos_embed{i + 1}")
            table, first = (table[:, 1:], table[:, :1]) if i == 3 else (table, None)
            table = positions(table, (side, side), size)
            if first is not None:
                tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1)
                table = torch.cat([first, table], 1)
            tokens = tokens + table
            for block in getattr(self, f"block{i + 1}"):
                tokens = block(tokens) if i == 3 else block["att"](tokens, size)
            if i < 3:
                x = tokens.reshape(len(tokens), *size, -1).permute(0, 3, 1, 2).contiguous()
        logits: Tensor = self.head(self.norm(tokens)[:, 0])
        return logits
