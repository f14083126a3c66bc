"""Attention block on the skip connections of MAResU-Net: any mechanism over positions, and one over channels.

Paper: Li et al. 2021, "Multistage Attention ResU-Net for Semantic Segmentation of Fine-Resolution Remote Sensing
Images".
"""

from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.activations import normalize
from linvit.attention.ops.decorators import full_precision
from linvit.layers.hosting import AttentionHost, attend, queries_keys_values
from linvit.registry import Spec, attentions

TAYLOR: Spec = {"name": "taylor", "key_reduction": 8}
"""Mechanism of the paper: queries and keys have an eighth of the channels."""


class PositionAttention(AttentionHost):
    """`x + gamma o` on a map (B, C, H, W): any registered mechanism over its positions. gamma begins at 0.

    As in the reference there is no output projection, unless the mechanism's output has other channels or needs a
    norm after it (`out_dim`, `norm`). A mechanism may declare a stem, a norm before the projection and a gate.
    """

    def __init__(self, dim: int, grid: Grid, attention: Spec = TAYLOR, num_heads: int = 1) -> None:
        super().__init__()
        self.mechanism: Attention = attentions.create(attention, dim=dim, num_heads=num_heads, grid=grid)
        self.surround([self.mechanism], dim)
        if self.mechanism.out_dim == dim and self.mechanism.host.norm != "bn2d":
            self.proj = nn.Identity()  # type: ignore[assignment]
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        grid = Grid((x.shape[2], x.shape[3]))
        tokens = x.flatten(2).mT  # (B, N, C)
        stemmed = tokens if self.stem is None else self.stem(tokens, grid)
        q, k, v = queries_keys_values(self.mechanism, self.qkv(stemmed).split(self.widths, -1), stemmed)
        out = attend(self.mechanism, q, k, v, grid, x=stemmed)
        return x + self.gamma * grid.plane(self.project(out, tokens))


class ChannelAttention(nn.Module):
    """`x + gamma A x` with `A = softmax(max(E) - E)`, `E = x x^T`, on a map (B, C, H, W) as C rows of H W entries.

    Paper: Fu et al. 2019, "Dual Attention Network for Scene Segmentation", with the sign of their code, with which
    unlike channels attend to each other. gamma begins at 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        rows = x.flatten(2)  # (B, C, N)
        return x + self.gamma * self.mix(rows, rows, rows).view_as(x)

    @full_precision
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, C, N) each -> (B, C, N)."""
        energy = q @ k.mT  # (B, C, C)
        return torch.softmax(energy.amax(-1, keepdim=True) - energy, -1) @ v


class LinearChannelAttention(ChannelAttention):
    """`x + gamma o`, `o_c = (sum_c' v_c' + sum_m (v_c . k_m) k_m) / (N + k_c . (sum_m k_m + eps))` over the rows c.

    Paper: Li et al. 2020, "Linear Attention Mechanism: An Efficient Attention for Semantic Segmentation", as its code
    computes it: v is x, k is x normalised to length one at each of N = H W positions (across channels), the numerator's
    query is v, and the denominator has N instead of the number of channels, so weights do not sum to 1.
    """

    eps = 1e-6
    norm_eps = 1e-12  # the reference lacks it and gives NaN for a position of zeros

    @full_precision
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, C, N) each -> (B, C, N)."""
        k = normalize(k, self.norm_eps, dims=(-2,))
        total = k.sum(-2).unsqueeze(-1) + self.eps  # (B, N, 1)
        numerator: Tensor = v.sum(-2, keepdim=True) + (v @ k.mT) @ k
        return numerator / (v.shape[-1] + k @ total)


CHANNEL_ATTENTIONS = {"softmax": ChannelAttention, "linear": LinearChannelAttention}


class AttentionSkip(nn.Module):
    """A convolution, then the sum of attention over positions and over channels: (B, C, H, W) of any size."""

    def __init__(
        self,
        dim: int,
        grid: Grid,
        attention: Spec = TAYLOR,
        num_heads: int = 1,
        channel_attention: Literal["softmax", "linear"] = "softmax",
        dropout: float = 0.1,
    ) -> None:
        super().__init__()

        def conv(kernel: int, dropped: float = 0.0) -> nn.Sequential:
            """Builds dropout of channels, a convolution that keeps their number, and ReLU."""
            layers: dict[str, nn.Module] = {"dropout": nn.Dropout2d(dropped)} if dropped else {}
            layers |= {"conv": nn.Conv2d(dim, dim, kernel, padding=kernel // 2), "relu": nn.ReLU()}
            return nn.Sequential(OrderedDict(layers))

        self.conv_in = conv(3)
        self.position_attention = PositionAttention(dim, grid, attention, num_heads)
        self.position_conv = conv(1, dropout)
        self.channel_attention = CHANNEL_ATTENTIONS[channel_attention]()
        self.channel_conv = conv(1, dropout)
        self.conv_out = conv(1, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        x = self.conv_in(x)
        positions = self.position_conv(self.position_attention(x))
        return self.conv_out(positions + self.channel_conv(self.channel_attention(x)))  # type: ignore[no-any-return]
