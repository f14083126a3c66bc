"""JetViT's linear block: `o = relu(q) (relu(k)^T v) / (relu(q) sum_m relu(k_m)) + conv(v)`, with kernels of the image.

The denominator is at least 1e-6. The depthwise convolution has one k x k kernel per image and channel, made of the mean
of the values over the patches by `B SiLU(A mean + a) + b`; at first B and b are zero, so a converted network begins as
pure linear attention. Class and register tokens take part in the linear attention alone.

Paper: Zou et al. 2026, "JetViT: Efficient High-Resolution Vision Transformer with Post-Training Attention Search" (CVPR
Findings). Follows the public implementation in vit-pytorch, since the authors have not published code; it begins with
torch's initial values instead of zeros (`zero_init: false`). The convolution of Jet-Nemotron's JetBlock, with kernels
of each token, is causal in a sequence; it has no counterpart here.
Cost: `2 N C dk + N h dk + k^2 P C + C (C / r) + k^2 C (C / r)` MACs with a hidden layer of C / r channels. Rank: N per
channel (dk without the convolution). A query without a positive entry gets zeros of the linear part.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid, Packed
from linvit.attention.declarations import Facts
from linvit.attention.ops.functional import join_heads, linear_as_given, split_heads
from linvit.attention.ops.linear import linear_attention
from linvit.attention.ops.value_conv import convolve_images, depthwise_matrix
from linvit.errors import check_number, check_odd

EPS = 1e-6


class JetViTAttention(Attention):
    """ReLU linear attention and a dynamic depthwise convolution of the values, O(N d^2).

    Args:
        kernel_size: Side k of the kernels, odd.
        reduction: The generator of kernels has C / reduction hidden channels.
        zero_init: Begin with kernels of zeros.
    """

    facts = Facts(complexity="O(N)", same_grid=True, channelwise=True, linear_in_values=False, packs=True)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        kernel_size: int = 3,
        reduction: int = 4,
        zero_init: bool = True,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("kernel_size", kernel_size, at_least=1, whole=True)
        check_odd("kernel_size", kernel_size, "3 or 5")
        check_number("reduction", reduction, at_least=1, whole=True)
        self.kernel_size = kernel_size
        hidden = max(dim // reduction, 1)
        last = nn.Linear(hidden, dim * kernel_size**2)
        if zero_init:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), last)
        self.declare(state_size=dim * (self.key_dim + 1) + num_heads * self.key_dim)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, N, dk), (B, h, N, d) -> (B, h, N, d); keys outside `mask` (B, N) take no part."""
        keys = F.relu(k)
        if mask is not None:
            keys, v = keys * mask[:, None, :, None], v.masked_fill(~mask[:, None, :, None], 0)
        tokens = join_heads(v)
        local = convolve_images(self.kernels(tokens, grid, mask), split_heads(tokens, self.num_heads), grid)
        return local + linear_attention(F.relu(q), keys, v, EPS, least=True, grid=grid)

    def kernels(self, tokens: Tensor, grid: Grid | Packed, mask: Tensor | None = None) -> Tensor:
        """Returns kernels (B, C, k, k) of values (B, N, C), whose entries outside the mask are zero."""
        patches = tokens[:, grid.num_prefix :]
        if isinstance(grid, Packed):
            mean = grid.means(tokens, prefix=False)
        elif mask is None:
            mean = patches.mean(1)
        else:
            mean = patches.sum(1) / mask[:, grid.num_prefix :].sum(1, keepdim=True).clamp_min(1)
        side = self.kernel_size
        first, second = self.mlp[0], self.mlp[2]
        made = linear_as_given(second, F.silu(linear_as_given(first, mean)))  # type: ignore[arg-type]
        return made.unflatten(-1, (self.dim, side, side))  # type: ignore[no-any-return]

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Returns the matrices (B, h, d, N, N) of the channels, with the kernels of these values."""
        queries, keys = F.relu(q), F.relu(k)
        left = queries / (queries @ keys.sum(-2, keepdim=True).mT).clamp_min(EPS)
        kernels = self.kernels(join_heads(v), grid).unflatten(1, (self.num_heads, self.head_dim))
        return (left @ keys.mT).unsqueeze(2) + depthwise_matrix(kernels, grid)
