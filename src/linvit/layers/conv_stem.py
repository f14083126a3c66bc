"""What stands before the projections of a layer whose mechanism declares a stem."""

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import HOST_OPTIONS, Attention, Grid
from linvit.attention.ops.recompute import recomputed
from linvit.errors import check_choice


class ConvStem(nn.Module):
    """A linear layer, a depthwise 3 x 3 convolution of the patches and SiLU, (B, N, C) -> (B, N, C).

    Prefix tokens take no part in the convolution. Paper: Han et al. 2024, "Demystify Mamba in Vision: A Linear
    Attention Perspective", Fig. 3.

    Args:
        dim: Channels C.

    Attributes:
        recompute: See `linvit.Attention`.
    """

    recompute: bool = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, dim)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return self._convolved(self.in_proj(x), grid)

    @recomputed
    def _convolved(self, x: Tensor, grid: Grid) -> Tensor:
        return F.silu(grid.map_patches(self.conv, x))


def input_stem(mechanism: Attention, dim: int) -> ConvStem | None:
    """Builds what a mechanism declares as `stem`, for C = `dim` channels."""
    check_choice(f"{type(mechanism).__name__}.stem", mechanism.stem, HOST_OPTIONS["stem"])
    return ConvStem(dim) if mechanism.stem == "conv_silu" else None
