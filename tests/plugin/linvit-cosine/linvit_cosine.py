"""Cosine linear attention: `o = q (k^T v) / M` with q and k of unit length. Cost: (N + M) C d. Rank: at most d."""

from torch.nn import functional as F

import linvit


class Cosine(linvit.Attention):
    """Cosine linear attention, O(N d^2)."""

    def core(self, q, k, v, grid):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return q @ (k.mT @ v) / k.shape[-2]
