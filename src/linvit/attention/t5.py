"""T5, test-time training: `o = f'(q)` for an inner model f' that one gradient step has trained to map k to v.

Each head has an inner model `f(x) = (SiLU(x W1) * (x W2)) W3`, or `SiLU(x W1) W2`, with learnt weights. For every image
a step of gradient descent on `-(s/N) sum_t f(k_t) . v_t`, `s = d^-1/2`, gives f'. Keys are normed over the tokens
before, `(k - mean k) / sqrt(var k + 1)` in each channel, and q and k get a depthwise convolution, `x + conv(x)`.

Paper: Li et al. 2026, "Linearizing Vision Transformers with Test-Time Training" (ICML); follows the authors' code.
Cost: `9 N C d + 2 k^2 P C` MACs with a kernel of side k (silu_glu; 6 N C d with silu_mlp, 7 N C d with the loss mse).
Rank: there is no matrix over tokens, since the weights depend on part of the values. The state is the inner
model, 3 d^2 numbers per head (silu_mlp: 2 d^2), however many the tokens.

It is made for converting softmax attention: projections are kept, and new parameters are trained at twenty times the
learning rate (`new_lr_scale`), since at the initial values the output is next to 0. The bias of k has no effect. The
reference takes square images and no class token; here every token trains the inner model, and the convolutions pass the
prefix by. Outputs have no bound, and may leave the range of float16.
"""

from typing import Literal

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.functional import join_heads, split_heads
from linvit.attention.ops.value_conv import convolve_as_given, value_conv
from linvit.errors import check_number

NO_MATRIX = "one step of training on the keys and values gives the weights that turn a query into its output"


class T5Attention(Attention):
    """An inner model per head, trained by one step on keys and values and applied to the queries, O(N d^2).

    The paper's models are the default; `inner_model: silu_mlp` and `conv: 0` are its first version, `inner_model:
    silu_mlp` and `inner_loss: mse` the half of its diffusion model's attention that is not a neighbourhood's.

    Args:
        inner_model: "silu_glu", `(SiLU(x W1) * (x W2)) W3`, or "silu_mlp", `SiLU(x W1) W2`.
        inner_loss: "dot", `-(s/N) sum f(k) . v`, or "mse", `(s/2N) sum |f(k) - v|^2`.
        conv: Side of the depthwise convolutions of q and k, odd; 0 leaves them out.
        key_norm: "instance", the norm of each channel over the tokens, or "none".
        inner_lr: Rate of the inner step.
    """

    facts = Facts(complexity="O(N)", same_grid=True, same_width=True, linear_in_values=False, no_matrix=NO_MATRIX)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        inner_model: Literal["silu_glu", "silu_mlp"] = "silu_glu",
        inner_loss: Literal["dot", "mse"] = "dot",
        conv: int = 3,
        key_norm: Literal["instance", "none"] = "instance",
        inner_lr: float = 1.0,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("inner_lr", inner_lr, above=0)
        self.mse, self.key_norm, self.inner_lr = inner_loss == "mse", key_norm, inner_lr
        glu = inner_model == "silu_glu"
        self.w1 = inner_weight(num_heads, self.head_dim)
        self.w2 = inner_weight(num_heads, self.head_dim)
        self.w3 = inner_weight(num_heads, self.head_dim) if glu else None
        self.declare(equivariant=conv == 0, state_size=(2 + glu) * self.w1.numel())
        self.q_conv2d = value_conv("conv", dim, conv)
        self.k_conv2d = value_conv("conv", dim, conv)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d) each -> (B, h, N, d)."""
        if self.key_norm == "instance":
            variance, mean = torch.var_mean(k, -2, correction=0, keepdim=True)
            k = (k - mean) * (variance + 1).rsqrt()
        q, k = self._convolved(self.q_conv2d, q, grid), self._convolved(self.k_conv2d, k, grid)
        w1, w2 = self.w1.to(q.dtype), self.w2.to(q.dtype)
        w3 = None if self.w3 is None else self.w3.to(q.dtype)

        z1 = k @ w1
        act, slope = silu_and_slope(z1)
        z2 = 1 if w3 is None else k @ w2
        last = w2 if w3 is None else w3
        made = act * z2
        step = self.inner_lr * self.head_dim**-0.5
        error = (
            (v - made @ last if self.mse else v) * step / k.shape[-2]
        )  # less the gradient of the loss by f(k), times the rate
        back = error @ last.mT
        w1 = w1 + k.mT @ (back * slope * z2)
        last = last + made.mT @ error
        hidden = F.silu(q @ w1)
        if w3 is not None:
            hidden = hidden * (q @ (w2 + k.mT @ (back * act)))
        return hidden @ last  # type: ignore[no-any-return]

    def _convolved(self, conv: nn.Conv2d | None, x: Tensor, grid: Grid) -> Tensor:
        """`x + conv(x)` for the patches of (B, h, N, d)."""
        if conv is None:
            return x
        joined = grid.map_patches(lambda plane: plane + convolve_as_given(conv, plane), join_heads(x))
        return split_heads(joined, self.num_heads)


def inner_weight(num_heads: int, width: int) -> nn.Parameter:
    """Returns a matrix d x d of the inner model of each head, (1, h, d, d), with the reference's initial values."""
    return nn.Parameter(trunc_normal_(torch.empty(1, num_heads, width, width), std=0.02))


def silu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns SiLU and its derivative."""
    sigmoid = x.sigmoid()
    act = x * sigmoid
    return act, sigmoid + act * (1 - sigmoid)
