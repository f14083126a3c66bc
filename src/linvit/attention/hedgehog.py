"""Hedgehog: `o = phi(q) (phi(k)^T v) / (phi(q) sum_m phi(k_m) + 1e-12)` with a learnt map phi, which imitates softmax.

`y = x W_h (+ x)` for each head, and `phi = [softmax(y), softmax(-y)]` over the f entries of y; q and k have a map each.
It is made for the conversion of trained softmax models, whose weights phi learns to reproduce
(`linvit linearize`); there is no factor `dk^-1/2`.

Paper: Zhang et al. 2024, "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry" (ICLR). The
maps follow the authors' code of LoLCATs (Zhang et al. 2024), `joint` that of flash-linear-attention.
Cost: `(N + M) f (h dk + 2 C) + 2 N f h` MACs with f features of each sign. Rank: at most 2 f. Rows sum to 1, and all
weights are positive.

The references' bias of one number per head has no effect, and is left out.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Precision
from linvit.attention.ops.functional import upcast
from linvit.attention.ops.linear import linear_attention, linear_factors
from linvit.errors import UserError, check_number

EPS = 1e-12
"""Minimum of a feature, also added to the denominator."""


class HedgehogAttention(Attention):
    """Linear attention with a learnt feature map that imitates softmax, O(N d f).

    Args:
        feature_dim: Columns f of the map; None means dk. The published conversions take dk / 2.
        activation: "softmax_dim", or "exp_dim": `phi = [exp(y - max y), exp(min y - y)]`.
        half_space: Take the first half of phi alone, f features.
        skip: Add x to y; f must be dk.
        tied: One map for q and k.
        joint: One linear layer with a bias for all heads, and one softmax over `[2 y, -2 y]`, of the activation
            "softmax_dim" (flash-linear-attention); not a special case of the other.
        init: "identity": y is x at first, also with `skip`; "kaiming": uniform numbers, as the published conversions.
    """

    facts = Facts(complexity="O(N)", equivariant=True, packs=True)
    precision: ClassVar[Precision] = "mixed"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        feature_dim: int | None = None,
        activation: Literal["softmax_dim", "exp_dim"] = "softmax_dim",
        half_space: bool = False,
        skip: bool = False,
        tied: bool = False,
        joint: bool = False,
        init: Literal["identity", "kaiming"] = "identity",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        if feature_dim is not None:
            check_number("feature_dim", feature_dim, at_least=1, whole=True, note=", or null for the keys' width")
        width = feature_dim or self.key_dim
        if skip and width != self.key_dim:
            raise UserError(f"skip adds the keys' {self.key_dim} channels to feature_dim={width}; make them equal")
        if joint and (activation != "softmax_dim" or skip):
            raise UserError(f"joint is for activation=softmax_dim, skip=false; got {activation}, skip={skip}")
        self.activation, self.skip, self.joint, self.half_space = activation, skip, joint, half_space
        self.features_kept = width if half_space else 2 * width
        self.declare(max_rank=self.features_kept)
        maps = ("q",) if tied else ("q", "k")
        start = torch.eye(self.key_dim, width) * (not skip)
        shape = (1 if joint else num_heads, self.key_dim, width)
        self.maps = nn.ParameterDict({name: start.repeat(shape[0], 1, 1) for name in maps})
        self.biases = nn.ParameterDict({name: torch.zeros(width) for name in maps if joint})
        if init == "kaiming":
            for weight in self.maps.values():
                nn.init.kaiming_uniform_(weight)

    def features(self, x: Tensor, name: Literal["q", "k"]) -> Tensor:
        """Returns features phi of queries or keys, (B, h, N, dk) -> (B, h, N, 2 f)."""
        name = name if name in self.maps else "q"
        dtype, x = x.dtype, upcast(x)
        y = x @ self.maps[name].to(x.dtype)
        if self.joint:
            y = 2 * (y + self.biases[name].to(x.dtype))
            both = torch.cat([y, -y], -1).softmax(-1)
        else:
            y = y + x if self.skip else y
            if self.activation == "softmax_dim":
                both = torch.stack([y, -y], -2).softmax(-1).flatten(-2).to(dtype)
            else:
                both = torch.cat([y - y.amax(-1, keepdim=True), y.amin(-1, keepdim=True) - y], -1).exp()
        return F.threshold(both[..., : self.features_kept], EPS, EPS)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d); keys outside `mask` (B, M) take no part."""
        keys = self.features(k, "k")
        if mask is not None:
            keys = keys * mask[:, None, :, None]
        return linear_attention(self.features(q, "q"), keys, v, EPS, grid=grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """`diag(1 / (Q K^T 1 + eps)) Q` and `K`."""
        return linear_factors(self.features(q, "q"), self.features(k, "k"), EPS)
