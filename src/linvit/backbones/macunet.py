"""Encoder of MACU-Net: asymmetric convolution blocks on five maps, the first of the image's size.

Paper: Li et al. 2022, "MACU-Net for Semantic Segmentation of Fine-Resolution Remotely Sensed Images". It has no
attention; with the head `macunet` it is the paper's network. The paper pretrains nothing; the classifier is linvit's.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone, check_stages
from linvit.backbones.stage import Stage, pyramid_info, stage_grids
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.layers.ac_block import ACBlock
from linvit.registry import preset


class MACUNetEncoder(Backbone):
    """Stages of strides 1, 2, 4, 8 and 16 for images of any size: maximum pooling, then convolutions.

    Odd sides are rounded up. All layers have PyTorch's initial values, as in the reference.

    Args:
        img_size: Side, or (H, W), of the images; has no effect.
        drop_path_rate: Must be 0: there is no residual branch for stochastic depth.
        widths: Channels of each stage.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 256,
        drop_path_rate: float = 0.0,
        widths: Sequence[int] = (16, 32, 64, 128, 256),
        depths: Sequence[int] = (2, 2, 3, 3, 3),
    ) -> None:
        check_stages(len(widths), depths=depths)
        if drop_path_rate:
            raise UserError(
                f"MACU-Net's encoder has no residual branches, so stochastic depth has nothing to drop; got "
                f"drop_path_rate={drop_path_rate}. Set it to 0"
            )
        super().__init__(num_classes, widths[-1])
        self.stages = nn.ModuleList()
        strides = [1] + [2] * (len(widths) - 1)
        for stride, size, dim, depth in zip(
            strides, stage_grids(image_size(img_size), strides), widths, depths, strict=True
        ):
            blocks = [TokenACBlock(dim if j else in_chans, dim) for j in range(depth)]
            self.stages.append(Stage(dim, Grid(size), MaxPool(stride), blocks))
            in_chans = dim
        self.finalize(nn.Identity(), pyramid_info(widths, stride=1))


class TokenACBlock(ACBlock):
    """An AC block on the tokens of a grid, (B, N, C) -> (B, N, C')."""

    def forward(self, x: Tensor, grid: Grid) -> Tensor:  # type: ignore[override]  # the grid has the positions
        """(B, N, C) -> (B, N, C')."""
        return grid.map_patches(super().forward, x)


class MaxPool(nn.Module):
    """Maps (B, C, H, W) to tokens (B, N, C), the maxima in squares, and their grid; a side of 1 is not pooled."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Returns tokens and their grid."""
        if self.side > 1:
            x = F.max_pool2d(x, self.side, ceil_mode=True)
        return x.flatten(2).mT, (x.shape[2], x.shape[3])


macunet_encoder = preset(MACUNetEncoder)
