"""The simple feature pyramid: maps of several sizes from the map, or maps, of a plain vision transformer.

Paper: Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection" (ViTDet), Sec. 3; layers and
initial values are detectron2's.
"""

from collections.abc import Sequence

from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import UserError

REDUCTIONS = (4, 8, 16, 32)
"""Reductions of the maps of a pyramid."""


class SimpleFeaturePyramid(nn.Module):
    """Maps (B, C, H / s, W / s) to a pyramid of maps (B, width, H / r, W / r), the finest first.

    Each level is independent: it doubles a map by transposed convolutions or max-pools it, followed by a 1 x 1 and a
    3 x 3 convolution, each with a LayerNorm over the channels, or without `norm` a bias. The maps'
    reduction s is 16 or a smaller power of two.
    """

    def __init__(
        self,
        channels: int,
        reduction: int,
        reductions: Sequence[int] = REDUCTIONS,
        width: int = 256,
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.channels, self.reductions = (width,) * len(reductions), tuple(reductions)
        self.levels = nn.ModuleList(level(channels, reduction / r, width, norm) for r in reductions)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps one map to all levels, or distributes several maps, those of earlier blocks to finer levels."""
        count = len(self.levels)
        return [level(maps[i * len(maps) // count]) for i, level in enumerate(self.levels)]


class ConvNorm(nn.Conv2d):
    """Convolution that keeps the size, and LayerNorm over the channels: (B, C, H, W) -> (B, C', H, W)."""

    def __init__(self, into: int, out: int, kernel: int, norm: bool) -> None:
        super().__init__(into, out, kernel, padding=kernel // 2, bias=not norm)
        self.norm = LayerNorm2d(out) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H, W)."""
        return self.norm(super().forward(x))  # type: ignore[no-any-return]


class MaxPool(nn.Module):
    """Maxima of squares of `side` pixels; squares cut by the border are left out unless there is no other."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, C, H, W) to (B, C, H / side, W / side), at least one pixel."""
        return F.max_pool2d(x, [min(self.side, length) for length in x.shape[-2:]])


def level(channels: int, scale: float, width: int, norm: bool) -> nn.Sequential:
    """Builds the layers of one level, with maps `scale` times as large as the transformer's."""
    layers: list[nn.Module] = []
    if scale < 1:
        layers.append(MaxPool(round(1 / scale)))
    while scale > 1:
        if layers:
            layers += [*[LayerNorm2d(channels)] * norm, nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, 2, stride=2))
        channels, scale = channels // 2, scale / 2
    return nn.Sequential(*layers, ConvNorm(channels, width, 1, norm), ConvNorm(width, width, 3, norm))


def check_reduction(reduction: int, backbone: str, others: str) -> None:
    """Raises a `UserError` if no pyramid can be made from a plain transformer's maps; `others` are other heads."""
    if reduction not in (1, 2, 4, 8, 16):
        hint = f", or a head that needs no pyramid: {others}" if others else ""
        raise UserError(
            f"{backbone} has only maps at a reduction of {reduction}, from which a feature pyramid at reductions of "
            f"{', '.join(map(str, REDUCTIONS))} cannot be made. Use patches of 16, 8 or 4 pixels{hint}"
        )
