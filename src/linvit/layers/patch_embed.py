"""Patch embedding: strided convolutions that turn an image or a feature plane into tokens."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


class PatchEmbed(nn.Module):
    """(B, C, H, W) -> tokens (B, N, dim) and their grid (H', W'): convolution, then LayerNorm.

    Without overlap (`kernel == stride`) a plane whose sides are not multiples of the stride is padded with zeros on the
    right and the bottom. With overlap only the convolution pads.
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        kernel: int,
        stride: int,
        padding: int = 0,
        norm: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding)
        self.norm = nn.LayerNorm(dim, eps=norm_eps) if norm else nn.Identity()
        self.multiple = stride if kernel == stride else 1

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Returns tokens and their patch grid."""
        height, width = x.shape[-2:]
        below, right = -height % self.multiple, -width % self.multiple
        if below or right:
            x = F.pad(x, (0, right, 0, below))
        x = self.proj(channels_last(x))  # (B, dim, H', W'), in memory token by token
        return self.norm(x.flatten(2).mT), (x.shape[2], x.shape[3])


def channels_last(x: Tensor) -> Tensor:
    """Returns (B, C, H, W) in channels-last memory layout, in a form that `torch.vmap` also accepts."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


class ConvEmbed(nn.Module):
    """(B, C, H, W) -> tokens (B, N, dim) and their grid (H', W'): 3 x 3 convolutions with BatchNorm and activation.

    `widths` are the channels before the first and after each convolution. Sides are divided by the stride, rounded up.
    """

    def __init__(
        self,
        widths: Sequence[int],
        strides: Sequence[int],
        act: Callable[[], nn.Module] = nn.ReLU,
        last_act: bool = True,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for (into, out), stride in zip(pairwise(widths), strides, strict=True):
            layers += [nn.Conv2d(into, out, 3, stride, padding=1), nn.BatchNorm2d(out), act()]
        self.proj = nn.Sequential(*layers if last_act else layers[:-1])

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Returns tokens and their patch grid."""
        x = self.proj(channels_last(x))  # (B, dim, H', W'), in memory token by token
        return x.flatten(2).mT, (x.shape[2], x.shape[3])
