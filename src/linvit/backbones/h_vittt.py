"""H-ViT^3: a convolutional pyramid of test-time training layers with rotary positions.

Paper: Han et al. 2026, "ViT^3: Unlocking Test-Time Training in Vision" (CVPR). The plain models, `vittt_tiny` and so
on, are presets of DeiT.

Published with `drop_path_rate` 0.2 (tiny), 0.4 (small) and 0.6 (base).
"""

from functools import partial

from torch import Tensor, nn

from linvit.backbones.mlla import MLLA, ConvTokens, normed_conv
from linvit.backbones.ravlt import ConvMlp
from linvit.registry import preset


class TokenBatchNorm(nn.BatchNorm1d):
    """BatchNorm of each channel over all tokens of the batch, (B, N, C) -> (B, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return super().forward(x.flatten(0, 1)).view_as(x)


class HViTTT(MLLA):
    """H-ViT^3: MLLA's pyramid with another stem, one convolution per block, and a convolution in MLPs.

    Args:
        feature_norms: Add a LayerNorm for each feature, for the last one instead of the final BatchNorm (as in the
            reference for dense prediction).
    """

    cpe = 1
    last_norm = TokenBatchNorm

    def stem(self, in_chans: int, dim: int) -> nn.Module:
        """Builds five convolutions with BatchNorm, ReLU between them."""
        half, layers = dim // 2, list[nn.Module]()
        for into, out, stride in ((in_chans, half, 2), (half, half, 1), (half, half, 1), (half, 4 * dim, 2)):
            layers += [*normed_conv(into, out, 3, stride), nn.ReLU()]
        return ConvTokens(*layers, *normed_conv(4 * dim, dim, 1))

    def mlp(self, dim: int, hidden: int) -> nn.Module:
        """Builds the MLP of a block."""
        return ConvMlp(dim, hidden, last_act=True)


_h_vittt = partial(HViTTT, attention={"name": "vittt", "rotary": True})
h_vittt_tiny = preset(_h_vittt, embed_dim=(64, 128, 320, 512), depths=(1, 3, 9, 4), num_heads=(2, 4, 10, 16))
h_vittt_small = preset(h_vittt_tiny, depths=(2, 6, 18, 8))
h_vittt_base = preset(_h_vittt, embed_dim=(96, 192, 448, 640), depths=(2, 6, 18, 8), num_heads=(3, 6, 14, 20))
