"""MonarchAttention: `o[n, p] = sum_m L_p[n, m] sum_j R_m[p, j] v[m, j]`, near softmax attention without training.

Tokens in their order are cut into B blocks of b, so that a token is (block n, place p). The weight from query (n, p) to
key (m, j) is a Monarch matrix: R mixes places inside a block of keys, L mixes blocks. With `s = dk^-1/2` each of
the `steps` rounds sets `R_m[p] = softmax_j(s a_mp.k_mj / c_mp)` and then
`L_p[n] = softmax_m(q_np.(s sum_j R_m[p, j] k_mj) + entropy(R_m[p]))`. At first `a = q` and `c = 1`, between rounds
`c_mp = sum_n L_p[n, m]` and `a_mp = sum_n L_p[n, m] q_np`: coordinate ascent on the variational form of softmax.

Paper: Yaras et al. 2025, "MonarchAttention: Zero-Shot Conversion to Fast, Hardware-Aware Structured Attention"
(NeurIPS). Follows the authors' code. It has no parameters and takes the place of softmax in trained models.
Cost: `S h dk (2 T b + (2 T - 1) B) + S C (b + B)` MACs for S = B b tokens after padding, T rounds. Rank: up to N.
Rows sum to 1, and all weights are positive. One block (b of at least N) is softmax attention.

The reference's row maximum has a lower bound of 1e-12, so a row whose logits are all below about -23 fades to zero,
and a block whose keys are all masked keeps a share of the weights; neither is so here.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.functional import is_exporting
from linvit.attention.ops.local import masked_softmax
from linvit.errors import check_number

FAR = -1e30
"""The logit of a key that takes no part. A block of nothing else has an entropy near it, and so no weight either."""


class MonarchAttention(Attention):
    """Softmax attention by a Monarch matrix, O(N^1.5 d).

    Args:
        block: Tokens b of a block; None means W, so that blocks are rows of the image. The cost is least at sqrt(N).
        steps: Rounds T. The paper takes 1 to 3.
        pad: Where tokens are added up to a whole block: "pre", before all tokens, so that prefix tokens fill the first
            block and rows stay whole; or "post".
        exact_prefix: Give class and register tokens their softmax over all keys, for `p N (h dk + C)` more MACs. In a
            trained network a block of its own does not imitate their rows.
    """

    facts = Facts(complexity="O(N^1.5)", same_grid=True)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        block: int | None = None,
        steps: int = 2,
        pad: Literal["pre", "post"] = "pre",
        exact_prefix: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        if block is not None:
            check_number("block", block, at_least=1, whole=True, note=", or null for the rows of the image")
        check_number("steps", steps, at_least=1, whole=True)
        self.block, self.steps, self.pad, self.exact_prefix = block, steps, pad, exact_prefix

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, N, dk), (B, h, N, d) -> (B, h, N, d); tokens outside `mask` (B, N) take no part."""
        tokens, block = q.shape[2], self.block or grid.size[1]
        rest = -tokens % block
        whole = not is_exporting() and rest == 0  # a program may have any number of tokens
        before, behind = (rest, 0) if self.pad == "pre" else (0, rest)

        def blocks(x: Tensor) -> Tensor:
            """(..., N, C) -> (..., B, b, C)."""
            cut: Tensor = (x if whole else F.pad(x, (0, 0, before, behind))).unflatten(-2, (-1, block))
            return cut

        prefix = grid.num_prefix if self.exact_prefix else 0
        if prefix:
            of_keys = None if mask is None else mask[:, None, None]  # (B, 1, 1, N)
            first = masked_softmax(q[:, :, :prefix], k, v, of_keys, k.shape[-1] ** -0.5)
        kept = None  # (1 or B, 1, B, b, 1), all
        if mask is not None or not whole:
            kept = blocks(q.new_ones(1, 1, tokens, 1) if mask is None else mask[:, None, :, None].to(q.dtype))
        q, k, v = blocks(q), blocks(k), blocks(v)
        scaled = k * k.shape[-1] ** -0.5
        places = q.transpose(2, 3)  # (B, h, b, B, dk)
        sums = q  # a over c
        for step in range(self.steps):
            logits = sums @ scaled.mT  # (B, h, B, b, b)
            masked = logits if kept is None else logits.masked_fill(kept.mT == 0, FAR)
            inside = masked.softmax(-1)
            entropy = masked.logsumexp(-1) - (inside * logits).sum(-1)  # (B, h, B, b)
            means = (inside @ scaled).transpose(2, 3)  # (B, h, b, B, dk)
            across = (places @ means.mT + entropy.mT.unsqueeze(-2)).softmax(-1)  # (B, h, b, B, B)
            if step < self.steps - 1:
                shares = (across if kept is None else across * kept.transpose(2, 3)).mT  # (B, h, b, B keys, B queries)
                sums = (shares @ places / (shares.sum(-1, keepdim=True) + 1e-12)).transpose(2, 3)
        out: Tensor = (across @ (inside @ v).transpose(2, 3)).transpose(2, 3).flatten(2, 3)
        out = out[:, :, before : before + tokens]
        return torch.cat([first, out[:, :, prefix:]], 2) if prefix else out
