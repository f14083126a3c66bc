"""FLatten's attention."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Focused(nn.Module):
    """FLatten's `FocusedLinearAttention`, (B, N, C) -> (B, N, C); q and kv are two projections in PVT."""

    def __init__(
        self, dim: int, size: tuple[int, int], heads: int, *, factor: int = 3, kernel: int = 5, pvt: bool = False
    ) -> None:
        super().__init__()
        width = dim // heads
        self.size, self.heads, self.factor, self.pvt = size, heads, factor, pvt
        if pvt:
            self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        else:
            self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.dwc = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.scale = nn.Parameter(torch.zeros(1, 1, dim))
        self.positional_encoding = nn.Parameter(torch.zeros(1, math.prod(size), dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mask of shifted windows is ignored."""
        batch, tokens, channels = x.shape
        q, k, v = (self.q(x), *self.kv(x).chunk(2, dim=-1)) if self.pvt else self.qkv(x).chunk(3, dim=-1)
        k = k + self.positional_encoding
        q, k = F.relu(q) + 1e-6, F.relu(k) + 1e-6
        scale = F.softplus(self.scale)
        q, k = q / scale, k / scale
        q_norm, k_norm = q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)
        q, k = q**self.factor, k**self.factor
        q, k = q / q.norm(dim=-1, keepdim=True) * q_norm, k / k.norm(dim=-1, keepdim=True) * k_norm
        q, k, v = (part.reshape(batch, tokens, self.heads, -1).transpose(1, 2) for part in (q, k, v))  # (B, h, N, d)
        z = 1 / (q @ k.mean(dim=-2, keepdim=True).mT + 1e-6)
        context = (k.mT * tokens**-0.5) @ (v * tokens**-0.5)
        out = (q @ context * z).transpose(1, 2).reshape(x.shape)
        plane = v.mT.reshape(batch * self.heads, -1, *self.size)  # (B h, d, H, W)
        local = self.dwc(plane).reshape(batch, channels, tokens).mT
        projected: Tensor = self.proj(out + local)
        return projected
