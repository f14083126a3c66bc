"""Cross-covariance attention (XCiT): `o = v A^T` with `A = softmax(tau q'^T k')`, a matrix d x d over the channels.

Every channel of q and k is brought to length 1 over the tokens, `q' = q / ||q||`. Attention runs between the channels
of a head, so no token sees another but through A, in which all are summed.

Paper: El-Nouby et al. 2021, "XCiT: Cross-Covariance Image Transformers".
Cost: `2 N C d` MACs. Rank: there is no matrix over tokens; A has rank at most d.
"""

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention, Grid, Packed
from linvit.attention.declarations import Facts
from linvit.attention.ops.activations import cosines
from linvit.attention.ops.functional import upcast
from linvit.errors import check_number

EPS = 1e-12
"""Least norm of a channel."""


class XCAttention(Attention):
    """Cross-covariance attention, O(N d^2).

    Args:
        temperature: Initial factor tau on the logits of each head, which is learnt.
    """

    facts = Facts(
        complexity="O(N)", same_grid=True, same_width=True, equivariant=True, linear_in_values=False, packs=True
    )
    precision = "mixed"

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None, temperature: float = 1.0
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("temperature", temperature, above=0)
        self.temperature = nn.Parameter(torch.full((num_heads, 1, 1), float(temperature)))

    def no_weight_decay(self) -> set[str]:
        """Returns the temperature, as in the reference."""
        return {"temperature"}

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d) each -> (B, h, N, d)."""
        if isinstance(grid, Packed):
            matrices = self.channel_matrix(q, k, grid).index_select(0, grid.images(v.device)).transpose(0, 1)
            return grid.uncut(grid.cut(upcast(v)) @ matrices.mT).to(v.dtype)
        return v @ self.channel_matrix(q, k, grid).mT.to(v.dtype)

    def channel_matrix(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        """Returns a (B, h, d, d): how much each channel of the output takes of each channel of the values."""
        found = _packed_cosines(q, k, grid) if isinstance(grid, Packed) else cosines(q, k, EPS)
        return (found * self.temperature.to(found.dtype)).softmax(-1)


def _packed_cosines(q: Tensor, k: Tensor, grid: Packed) -> Tensor:
    """`cosines` of rows of packed images, (B, h, d, d) in the order of the row."""
    q, k = grid.cut(upcast(q)), grid.cut(upcast(k))  # (h, n, c, d)
    of_q, of_k = (grid.image_sums(x.square().sum(-2, keepdim=True)).clamp_min(EPS**2).sqrt() for x in (q, k))
    return (grid.image_sums(q.mT @ k) / (of_q.mT * of_k)).transpose(0, 1)
