"""Softmax attention inside windows: `o_i = softmax(q_i K^T / sqrt(d)) V` over the keys of the query's window.

Windows have w x w patches from the upper left corner, without a shift; those at the right and lower edge are smaller.
Class and register tokens are keys of every window, and see all keys themselves. A plain network with such blocks and a
few of full softmax is the backbone of ViTDet, and the local part of hybrids such as JetViT (Zou et al. 2026).

Paper: Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection" (ECCV). There, tokens pad the
grid to a multiple of the window and take part as keys; here no padded token does.
Cost: `(P w^2 + (N + P) p) (h dk + C)` MACs with p prefix tokens, where w divides both sides of the grid. Rank: up to N;
without prefix tokens the matrix is block diagonal. Rows sum to 1.
"""

from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.local import window_attention, windows_of
from linvit.errors import check_number


class WindowAttention(Attention):
    """Softmax attention inside windows for hosts without windows, O(N w^2), through torch's fused kernel.

    Args:
        window_size: Side w of the windows, in patches. A window as large as the grid is full softmax.
    """

    facts = Facts(complexity="O(N)", same_grid=True, packs=True)
    precision = "inherit"
    recompute = False

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None, window_size: int = 14
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("window_size", window_size, at_least=1, whole=True)
        self.window_size = window_size
        self.exports_any_size = min(grid.size) > window_size  # torch.export keeps to a single window

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, N, dk), (B, h, N, d) -> (B, h, N, d); keys outside `mask` (B, N) take no part."""
        return window_attention(q, k, v, windows_of(grid, self.window_size), self.key_dim**-0.5, mask)
