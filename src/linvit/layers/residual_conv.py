"""A depthwise convolution of the patches on a residual path: positions that follow from the surroundings."""

from torch import Tensor, nn

from linvit.attention.base import Grid


class ResidualConv(nn.Conv2d):
    """`x + conv(x)` with a 3 x 3 depthwise convolution of the patches, (B, N, C) -> (B, N, C); prefix tokens stay.

    Before attention it is the conditional positional encoding of Chu et al. 2021 ("Conditional Positional Encodings for
    Vision Transformers"): where a patch lies follows from its neighbours and from the zeros around the image.

    Args:
        dim: Channels C.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:  # type: ignore[override]  # tokens, not a plane
        """(B, N, C) -> (B, N, C)."""
        convolve = super().forward
        return grid.map_patches(lambda plane: plane + convolve(plane), x)
