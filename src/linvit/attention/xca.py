"""Cross-covariance attention (XCiT): `o = v A^T` with `A = softmax(tau q'^T k')`, a matrix d x d over the channels.

Every channel of q and k is brought to length 1 over the tokens, `q' = q / ||q||`. Attention runs between the channels
of a head, so no token sees another but through A, in which all are summed.

Paper: El-Nouby et al. 2021, "XCiT: Cross-Covariance Image Transformers".
Cost: `2 N C d` MACs. Rank: there is no matrix over tokens; A is of rank d at most.
"""

from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.decorators import takes_function
from linvit.attention.ops.functional import safe_norm, upcast, wide
from linvit.errors import check_number

EPS = 1e-12
"""Least norm of a channel."""


class XCAttention(Attention):
    """Cross-covariance attention, O(N d^2).

    Args:
        temperature: Initial factor tau on the logits of each head, which is learnt.
    """

    facts = Facts(complexity="O(N)", same_grid=True, same_width=True, equivariant=True, linear_in_values=False)
    precision = "mixed"

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None, temperature: float = 1.0
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("temperature", temperature, above=0)
        self.temperature = nn.Parameter(torch.full((num_heads, 1, 1), float(temperature)))

    def no_weight_decay(self) -> set[str]:
        """The temperature, as in the reference."""
        return {"temperature"}

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d) each -> (B, h, N, d)."""
        return v @ self.channel_matrix(q, k, grid).mT.to(v.dtype)

    def channel_matrix(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """A (B, h, d, d): how much each channel of the output takes of each channel of the values."""
        both = torch.stack([q, k])
        hand_written = both.requires_grad and takes_function(q) and not torch.compiler.is_compiling()
        cosines: Tensor = _Cosines.apply(both) if hand_written else _cosines(both)[0]
        return (cosines * self.temperature.to(cosines.dtype)).softmax(-1)


def _cosines(both: Tensor) -> tuple[Tensor, Tensor]:
    """Products of the unit channels of q and k, (2, B, h, N, d) -> (B, h, d, d), and the norms (2, B, h, 1, d)."""
    norms = safe_norm(both, EPS, 2, (-2,), wide(both))
    return upcast(both[0].mT @ both[1]) / (norms[0].mT * norms[1]), norms


class _Cosines(torch.autograd.Function):
    """`_cosines` with a gradient of few passes over the tokens: that of a norm is a multiple of its channel."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        cosines, norms = _cosines(both)
        ctx.save_for_backward(both, cosines, norms)
        return cosines

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        both, cosines, norms = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated, too
            found: Tensor = torch.autograd.grad(_cosines(both)[0], both, gradient, create_graph=True)[0]
            return found
        along = gradient * cosines
        shares = torch.stack([along.sum(-1).unsqueeze(-2), along.sum(-2, keepdim=True)]) * (norms > EPS)
        found = torch.mul(both, shares / -norms.square(), out=torch.empty_like(both))
        product = (gradient / (norms[0].mT * norms[1])).to(both.dtype).flatten(0, 1)
        (q, k), (of_q, of_k) = both.flatten(1, 2), found.flatten(1, 2)
        of_q.baddbmm_(k, product.mT)
        of_k.baddbmm_(q, product)
        return found
