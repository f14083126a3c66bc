"""Linear Attention Mechanism: `o_i = (sum_j v_j + q_i (K^T V)) / (N + q_i . (sum_j k_j + eps))`, q and k of length one.

The exponential of softmax attention by its first-order Taylor expansion, `sim(q, k) = 1 + q.k >= 0` for unit vectors.

Paper: Li et al. 2020, "Linear Attention Mechanism: An Efficient Attention for Semantic Segmentation", Eqs. 10-12.
Cost: `(N + M) C dk + N h dk` MACs. Rank: at most dk + 1.
"""

from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.activations import normalize, of_both
from linvit.attention.ops.linear import key_count, key_product, key_sum
from linvit.attention.packed import Packed
from linvit.errors import check_number


class TaylorAttention(Attention):
    """Linear attention by the first-order Taylor expansion of softmax attention, O(N d^2).

    The reference has one head, keys of C/8 channels (`key_reduction: 8`) and adds the layer's input, which is the
    residual connection of a block. Its denominators have no lower bound; here they are at least M times the machine
    epsilon, or keys that all oppose a query would give infinities of either sign. The paper's channel attention mixes
    channels and no tokens, so it is not a mechanism of this contract: it belongs with the heads of segmentation.

    Args:
        key_dim: Channels of q and k per head; None means C / h // `key_reduction`.
        key_reduction: Channels of the values over those of the keys; 8 in the reference.
        eps: Added to every channel of the key sum, as the reference does, not to the denominator as a whole.
        norm_eps: Smallest norm that q and k are divided by. The reference has none and gives NaN for a zero token.
        gamma: Multiply the output by a learnable scalar that begins at 0, the reference's start as the identity.
    """

    facts = Facts(complexity="O(N)", equivariant=True, packs=True)
    precision = "mixed"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        key_reduction: int = 1,
        eps: float = 1e-6,
        norm_eps: float = 1e-12,
        gamma: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        for name, value in (("eps", eps), ("norm_eps", norm_eps)):
            check_number(name, value, at_least=0)
        check_number("key_reduction", key_reduction, at_least=1, whole=True)
        if key_reduction != 1:
            self.set_key_dim(self.head_dim // key_reduction, option=f"key_reduction={key_reduction}", key_dim=key_dim)
        self.declare(max_rank=self.key_dim + 1)  # one for the constant term
        self.eps = eps
        self.norm_eps = norm_eps
        self.gamma = nn.Parameter(torch.zeros(1)) if gamma else None

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        q, k = of_both(lambda x: normalize(x, self.norm_eps), q, k)
        return (key_sum(v, grid) + key_product(q, k, v, grid)) * self._weights(q, k, grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`diag(gamma / denominator) [1, Q]` and `[1, K]`: the constant term is one more channel."""
        q, k = of_both(lambda x: normalize(x, self.norm_eps), q, k)
        ones_q, ones_k = torch.ones_like(q[..., :1]), torch.ones_like(k[..., :1])
        return torch.cat([ones_q, q], -1) * self._weights(q, k, grid), torch.cat([ones_k, k], -1)

    def _weights(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """`gamma / (M + q_i . (sum_j k_j + eps))` of unit vectors, (B, h, N, 1)."""
        keys: Any = key_count(k, grid)
        if isinstance(grid, Packed):
            total = key_product(q, k, torch.ones_like(k[..., :1]), grid)
            denominator = keys + total + self.eps * q.sum(-1, keepdim=True)
        else:
            denominator = keys + q @ (k.sum(-2) + self.eps).unsqueeze(-1)
        # All keys opposite to a query leave 0 up to rounding and the term of eps, which may be of either sign.
        least: Tensor = denominator.clamp_min(keys * torch.finfo(q.dtype).eps)
        return 1 / least if self.gamma is None else self.gamma.to(q.dtype) / least
