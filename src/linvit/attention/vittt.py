"""ViT^3, test-time training: `o = [f'(q), conv'(q2)]` for an inner model and a convolution trained on the image itself.

Each head has an inner model `f(x) = (x W1) * SiLU(x W2)`. For every image a step of gradient descent on
`-(1/3N) sum_t f(k_t) . v_t`, whose gradient is divided by 1 plus the norm of each of its columns, gives f'. Beside the
heads there is one more of d channels with its own q2, k2 and v2, linear maps of the layer's input: a depthwise 3 x 3
convolution, trained the same way, is applied to q2, so each image has its own kernel.

Paper: Han et al. 2026, "ViT^3: Unlocking Test-Time Training in Vision" (CVPR); follows the authors' code.
Cost: `6 N C d + 3 N C d + 9 P d` MACs, the second for q2, k2 and v2. Rank: there is no matrix over tokens, since the
weights depend on part of the values. The state is the inner models, 2 d^2 numbers per head and 9 d, however
many the tokens.

With few tokens or large values the divided gradients have columns of length 1, whatever the values are. Prefix tokens
train and query the heads, do not turn, and have no part in the convolution.
"""

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Host
from linvit.attention.ops.decorators import full_precision, recomputed
from linvit.attention.ops.functional import l2_norm
from linvit.attention.ops.rotary import check_rotary, rotate
from linvit.attention.ops.value_conv import convolve_each, shifts
from linvit.attention.t5 import NO_MATRIX, inner_weight, silu_and_slope
from linvit.errors import UserError, check_number

SCALE = 9**-0.5  # in both branches, after the nine weights of a kernel


class ViTTTAttention(Attention):
    """An inner model per head and a convolution, trained by one step on keys and values, O(N d^2).

    The output has a further head, so that of the host's projection is C + d wide.

    Args:
        rotary: Turn q and k of the inner models by their positions, over all channels before the head split, as `mlla`
            does (the hierarchical models).
        inner_lr: Rate of the inner step.
    """

    host = Host(input=True)
    facts = Facts(complexity="O(N)", same_grid=True, same_width=True, linear_in_values=False, no_matrix=NO_MATRIX)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        rotary: bool = False,
        inner_lr: float = 1.0,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("inner_lr", inner_lr, above=0)
        if rotary:
            check_rotary(dim, num_heads, self.key_dim, across=True)
        self.inner_lr = inner_lr
        self.out_heads, self.out_dim = num_heads + 1, dim + self.head_dim
        self.qkv2 = nn.Linear(dim, 3 * self.head_dim)
        trunc_normal_(self.qkv2.weight, std=0.02)
        nn.init.zeros_(self.qkv2.bias)
        self.w1 = inner_weight(num_heads, self.head_dim)
        self.w2 = inner_weight(num_heads, self.head_dim)
        self.w3 = nn.Parameter(trunc_normal_(torch.empty(self.head_dim, 1, 3, 3), std=0.02))
        self.declare(rotary=rotary, state_size=2 * self.w1.numel() + self.w3.numel())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor | None = None) -> Tensor:
        """(B, h, N, d) each and the layer's input x (B, N, C) -> (B, h + 1, N, d)."""
        if x is None:
            raise UserError("vittt makes a further head of the layer's input; pass it as x=")
        local = self.convolved(*(grid.plane(part) for part in self.qkv2(x).chunk(3, -1))).flatten(2).mT  # (B, H*W, d)
        if grid.num_prefix:
            local = F.pad(local, (0, 0, grid.num_prefix, 0))
        return torch.cat([self.core(q, k, v, grid), local[:, None].to(v.dtype)], dim=1)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Returns the trained inner models of the heads, (B, h, N, d)."""
        if self.facts.rotary:
            q, k = rotate(q, k, grid, width=self.dim, last=False)
        w1, w2 = self.w1.to(q.dtype), self.w2.to(q.dtype)
        act, slope = silu_and_slope(k @ w2)
        error = v * SCALE / v.shape[2]  # less the gradient of the loss by f(k)
        w2 = w2 + self._step(k.mT @ (error * (k @ w1) * slope))
        w1 = w1 + self._step(k.mT @ (error * act))
        return (q @ w1) * F.silu(q @ w2)

    @recomputed
    @full_precision
    def convolved(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns the trained convolution of q, all planes (B, d, H, W)."""
        error = v * SCALE / (v.shape[2] * v.shape[3])
        kernels = torch.stack([(shifted * error).sum((2, 3)) for shifted in shifts(k, 3)], -1)  # (B, d, 9)
        kernels = self.w3.flatten(1).to(q.dtype) + self._step(kernels.mT).mT
        return convolve_each(q, kernels.unflatten(2, (3, 3)))

    def _step(self, gradient: Tensor) -> Tensor:
        """Returns the rate times a gradient whose columns are divided by 1 plus their length."""
        return self.inner_lr * gradient / (l2_norm(gradient.mT).mT + 1)
