"""Linear-angular attention (Castling-ViT): `o = u(y) + dconv(v)` with `y = v / 2 + u(q) (u(k)^T v) / pi`.

`u(x) = x / ||x||`. The angular kernel `1 - angle(q, k) / pi = 1/2 + <u(q), u(k)> / pi + higher odd powers` is cut after
its linear term; a depthwise convolution of the values and, in training, a softmax map without its small weights
replace the rest. Instead of a denominator that sums over the keys, each token's y is divided by its L2 norm.

Paper: You et al. 2023, "Castling-ViT: Compressing Self-Attention via Switching Towards Linear-Angular Attention at
Vision Transformer Inference".
Cost: `2 N C dk + r N C` MACs (2 N^2 C more while training with `sparse_reg`). Rank: N; d for `u(q) u(k)^T` alone.
"""

import copy
import math
from typing import Literal

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid, Packed
from linvit.attention.declarations import Facts
from linvit.attention.ops.activations import normalize, of_both
from linvit.attention.ops.functional import safe_norm
from linvit.attention.ops.linear import key_mean, key_product
from linvit.attention.ops.value_conv import ConvolvedValues, convolve_heads, convolve_sequence
from linvit.errors import UserError, check_number, check_odd


class LinearAngularAttention(Attention):
    """Linear-angular attention with a depthwise convolution of the values, O(N d^2).

    Each token adds its own value, so there must be as many keys as queries: no spatial reduction.

    Args:
        res_kernel_size: Length r of the convolution's kernel, odd.
        sparse_reg: Add the softmax map of q and k, its weights up to `sparse_threshold` set to 0 and the others left as
            they are. Only while training, where it makes time and memory O(N^2) (`complexity` then says so).
        sparse_threshold: Weights must be greater than this to stay.
        half: Factor of the kernel's constant 1/2: "identity", the token's own value (the reference code and the
            paper's figure), or "mean", the mean of all values (nearer to the kernel, whose constant sees every key).
        out_norm: Divide each token of y by its L2 norm over the channels of a head. The equivalent matrix then depends
            on v, so it cannot be probed and `attention_matrix` returns it for given values.
        eps: Lower bound of the norms of q, k and y. 0 is the reference code, but for a vector of zeros, which gives NaN
            there and stays 0 here.
        dconv: "seq1d": one kernel of r taps per head along the sequence of tokens, the prefix included (the reference);
            "grid2d": one of r x r taps on the grid, which reads and writes patch tokens only.
    """

    facts = Facts(complexity="O(N)", same_grid=True, packs=True)
    precision = "mixed"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        res_kernel_size: int = 9,
        sparse_reg: bool = False,
        sparse_threshold: float = 0.02,
        half: Literal["identity", "mean"] = "identity",
        out_norm: bool = True,
        eps: float = 1e-6,
        dconv: Literal["seq1d", "grid2d"] = "seq1d",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_odd("res_kernel_size", res_kernel_size, "9")
        check_number("sparse_threshold", sparse_threshold, at_least=0, below=1, note=", as it cuts softmax")
        check_number("eps", eps, at_least=0, note=", such as 1e-6")
        self.sparse_reg = sparse_reg
        self.sparse_threshold = sparse_threshold
        self.own_half = half == "identity"
        self.unit_outputs = out_norm
        self.eps = eps
        self.declare(linear_in_values=not out_norm)
        if sparse_reg:
            self.declare(complexity="O(N^2)", packs=False)
        self.on_grid = dconv == "grid2d"
        shape = (res_kernel_size, res_kernel_size if self.on_grid else 1)
        padding = (shape[0] // 2, shape[1] // 2)
        self.dconv = nn.Conv2d(num_heads, num_heads, shape, padding=padding, groups=num_heads, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, N, dk), (B, h, N, d) -> (B, h, N, d)."""
        return self.core(q, k, v, grid) + self.convolved(v, grid)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Returns the linear-angular attention, normalised."""
        unit_q, unit_k = of_both(lambda x: normalize(x, self.eps), q, k)
        halved = v if self.own_half else key_mean(v, grid)
        if isinstance(grid, Packed):
            y = key_product(unit_q, unit_k, v / math.pi, grid) + 0.5 * halved
        else:
            y = (unit_q @ (unit_k.mT @ v / math.pi)).add_(halved, alpha=0.5)
        if self.sparse_reg and self.training:
            y = y + self._sparse_map(q, k) @ v
        return normalize(y, self.eps) if self.unit_outputs else y

    def _sparse_map(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns softmax weights (B, h, N, N) above the threshold, from the original q and k."""
        weights: Tensor = (q * self.key_dim**-0.5 @ k.mT).softmax(-1)
        return weights * (weights > self.sparse_threshold)

    def convolved(self, v: Tensor, grid: Grid) -> Tensor:
        """Returns the depthwise convolution of the values, (B, h, N, d) -> (B, h, N, d)."""
        return (convolve_heads if self.on_grid else convolve_sequence)(self.dconv, v, grid)

    def matrix_parts(self) -> dict[str, Attention]:
        """Returns the normalised attention, the constant's share included, and the convolution."""
        kernel = copy.deepcopy(self)
        nn.init.zeros_(kernel.dconv.weight)
        return {"kernel": kernel, "convolution": ConvolvedValues(self)}

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid) -> Tensor:
        """Returns the matrix (B, h, N, N) for these values: `diag(1 / ||y||) Y + T` with `y = Y v`."""
        if v is None:
            raise UserError("the matrix of linear_angular with out_norm depends on the values; pass v=")
        one_hot = torch.eye(grid.num_keys, dtype=v.dtype, device=v.device).expand(1, self.num_heads, -1, -1)
        matrix = normalize(q, self.eps) @ normalize(k, self.eps).mT / math.pi
        matrix = matrix + (one_hot if self.own_half else 1 / grid.num_keys) / 2
        if self.sparse_reg and self.training:
            matrix = matrix + self._sparse_map(q, k)
        if self.unit_outputs:
            matrix = matrix / safe_norm(matrix @ v, self.eps)
        return matrix + self.convolved(one_hot, grid)
