"""The pre-norm transformer block of all families but SOFT."""

from timm.layers import DropPath
from torch import Tensor, nn

from linvit.attention.base import Grid


class Block(nn.Module):
    """`x + attn(norm1 x)`, then `x + mlp(norm2 x)`, each under stochastic depth; (B, N, C) -> (B, N, C).

    Args:
        dim: Channels C.
        attn: Token mixer, called with tokens and grid.
        mlp: Feed-forward layer, called with tokens and grid.
        drop_path: Rate of stochastic depth.
        norm_eps: Of both LayerNorms.
        input_before_norm: Call the token mixer with `before_norm=x`, too, which CSWin's can take.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        drop_path: float,
        norm_eps: float,
        *,
        input_before_norm: bool = False,
    ) -> None:
        super().__init__()
        self.input_before_norm = input_before_norm
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = mlp
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        extra = {"before_norm": x} if self.input_before_norm else {}
        x = x + self.drop_path1(self.attn(self.norm1(x), grid, **extra))
        return x + self.drop_path2(self.mlp(self.norm2(x), grid))  # type: ignore[no-any-return]
