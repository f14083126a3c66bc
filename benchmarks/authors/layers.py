"""What several of the models are made of."""

from torch import Tensor, nn
from torch.nn import functional as F


class Softmax(nn.Module):
    """PVT's attention without spatial reduction."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        batch, tokens, _ = x.shape
        q = self.q(x).reshape(batch, tokens, self.heads, -1).permute(0, 2, 1, 3)
        k, v = self.kv(x).reshape(batch, tokens, 2, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.mT * self.scale).softmax(-1)
        projected: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(x.shape))
        return projected


class Mlp(nn.Module):
    """(B, N, C) -> (B, N, C)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """The pre-norm block of PVT and DeiT."""

    def __init__(self, dim: int, attn: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, 1e-6), attn
        self.norm2, self.mlp = nn.LayerNorm(dim, 1e-6), Mlp(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Patches(nn.Module):
    """Strided convolution and LayerNorm, (B, C, H, W) -> (B, N, dim)."""

    def __init__(self, channels: int, dim: int, stride: int, norm: bool = True) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, stride, stride)
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, dim)."""
        out: Tensor = self.norm(self.proj(x).flatten(2).transpose(1, 2))
        return out


def positions(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A table (1, N, C) interpolated also where the size is the same, as PVT and SOFT do it."""
    plane = table.reshape(1, *old, -1).permute(0, 3, 1, 2)
    return F.interpolate(plane, size=new, mode="bilinear").flatten(2).transpose(1, 2)
