"""Agent attention: `o = softmax(s q a^T + B2) softmax(s a k^T + B1) v + DWC(v)` with few agents a, pooled queries.

The n agents are the means of the patch queries over a small square grid, `s = dk^-1/2`, B1 and B2 are learnable biases
of positions, and DWC is a depthwise convolution of the values.

Paper: Han et al. 2024, "Agent Attention: On the Integration of Softmax and Linear Attention".
Cost: `n (N + M) (h dk + C) + (s + 1) h n (P + Q) + k^2 P C` MACs with n agents, tables of side s (biases are made once
for all images) and a kernel of side k, linear in N as n is fixed. Rank: N per channel (n without the convolution).

Each bias is the sum of a table of positions, `bias_size` x `bias_size`, interpolated (bilinear) to the grid, and of one
number per row and per column. The reference interpolates these (linear) when it loads weights of another size; here
they follow the grid of every call. Its class token is a query and a key but not part of an agent, and so are all prefix
tokens here, which share one bias. In CSWin the host's LePE replaces the convolution: `dwc_kernel=0`.
"""

import math

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.functional import SizeOf, join_heads, pooled, same_size, split_heads, upcast, wide
from linvit.attention.ops.value_conv import ConvolvedAttention, value_conv
from linvit.errors import UserError, check_number

KEY_TABLES = ("an_bias", "ah_bias", "aw_bias", "ac_bias")
"""Biases that are added to B1: per position, row and column of the keys, and of prefix tokens."""
QUERY_TABLES = ("na_bias", "ha_bias", "wa_bias", "ca_bias")
"""Biases that are added to B2."""


class AgentAttention(ConvolvedAttention):
    """Two softmax attentions, of the agents over the keys and of the queries over the agents, O(N n d).

    Args:
        grid: Nominal grid; sets the lengths of the biases of rows and columns, which are resized (linear) for others.
        agents: Agents n, a square such as 9, 16 or 49.
        position_bias: The learnable biases B1 and B2.
        bias_size: Side of the biases' tables of positions.
        pool_size: Side of the grid that the queries are pooled to, if not `sqrt(agents)`: the authors' detectors and
            segmentors have more agents than the biases, which are interpolated (bilinear) over the agents.
        dwc_kernel: Side of the convolution's kernels, one for each of the C channels; 0 disables the convolution.

    Raises:
        UserError: If `agents` is not a square.
    """

    facts = Facts(complexity="O(N)")
    precision = "mixed"
    convolution = "dwc"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        agents: int = 49,
        position_bias: bool = True,
        bias_size: int = 7,
        pool_size: int | None = None,
        dwc_kernel: int = 3,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("agents", agents, at_least=1, whole=True)
        check_number("bias_size", bias_size, at_least=1, whole=True)
        side = math.isqrt(agents)
        if side**2 != agents:
            raise UserError(
                f"agents must be a square, since the queries are pooled to a square grid: {side**2} and "
                f"{(side + 1) ** 2} are the nearest; got {agents}"
            )
        if pool_size is not None:
            check_number("pool_size", pool_size, at_least=1, whole=True)
        self.agents = agents
        self.side = pool_size or side
        sizes: dict[str, tuple[int, ...]] = {}
        for names, (rows, columns) in ((KEY_TABLES, grid.keys_size), (QUERY_TABLES, grid.size)):
            shapes = (bias_size, bias_size), (rows, 1), (1, columns), (1,)
            sizes |= dict(zip(names if grid.num_prefix else names[:3], shapes, strict=False))
        self.tables = nn.ParameterDict(
            {name: trunc_normal_(torch.empty(num_heads, agents, *size), std=0.02) for name, size in sizes.items()}
            if position_bias
            else {}
        )
        self.dwc = value_conv("dwc_kernel", dim, dwc_kernel)
        self.declare(channelwise=self.dwc is not None, max_rank=self.side**2)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Returns the two attentions, the agents' first."""
        left, right = self._maps(q, k, grid)
        values = right @ v.to(right.dtype, memory_format=torch.contiguous_format)  # (B, h, n, d)
        if v.dtype != torch.bfloat16:
            return left @ values
        # Rows of the left factor sum to 1: the common part of all values is not rounded twice, and needs no gradient.
        mean = values.detach().mean(-2, keepdim=True)
        return left @ (values - mean).to(v.dtype) + mean.to(v.dtype)

    def _maps(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns the weights of the agents for each query (B, h, N, n) and of the keys for each agent (B, h, n, M)."""
        agents = split_heads(
            pooled(grid.plane(join_heads(q)), self.side).flatten(2).mT, self.num_heads
        )  # (B, h, n, dk)
        agents = agents * self.key_dim**-0.5
        to_agents, to_keys = q @ agents.mT, agents @ k.mT
        if self.tables:
            to_agents = to_agents + self._bias(QUERY_TABLES, grid.size, grid.num_prefix, wide(q)).mT.to(q.dtype)
            to_keys = to_keys + self._bias(KEY_TABLES, grid.keys_size, grid.num_prefix, wide(q))
        return to_agents.softmax(-1), to_keys.softmax(-1)

    def _bias(self, names: tuple[str, ...], size: tuple[int, int], num_prefix: int, dtype: torch.dtype) -> Tensor:
        """Returns the bias (h, n, tokens) between the agents and the tokens of a grid; see `KEY_TABLES`."""
        places, rows, columns = (self.tables[name].to(dtype) for name in names[:3])
        side = places.shape[2]
        across = resized(places, (side, size[1])) + resized(columns, (1, size[1]))  # (h, n, side, W)
        # By a product along the rows, since compiled code would interpolate again for every entry of the logits.
        eye = torch.eye(side, dtype=dtype, device=places.device)[None, None]
        down = resized(eye, (size[0], side))  # (1, 1, H, side)
        left = torch.cat([down.expand(*places.shape[:2], -1, -1), resized(rows, (size[0], 1))], dim=3)
        patches = (left @ F.pad(across, (0, 0, 0, 1), value=1.0)).flatten(2)  # (h, n, H W)
        if num_prefix:
            prefix = self.tables[names[3]].to(dtype) if names[3] in self.tables else patches.new_zeros(1)
            patches = torch.cat([prefix.expand(*patches.shape[:2], num_prefix), patches], dim=2)
        if self.side**2 == self.agents:
            return patches
        agents = torch.eye(self.agents, dtype=dtype, device=places.device)[None].unflatten(
            2, (-1, math.isqrt(self.agents))
        )
        return resized(agents, (self.side, self.side)).flatten(2).mT @ patches

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Returns the biases of a checkpoint for the nominal grid (bilinear; linear for rows and for columns)."""
        for name, own in self.tables.items():
            given = state.get(f"tables.{name}")
            if given is not None and given.ndim == own.ndim == 4 and given.shape[:2] == own.shape[:2]:
                state[f"tables.{name}"] = resized(given, own.shape[2:])
        return state

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns the weights of both attentions."""
        left, right = self._maps(q, k, grid)
        return left, right.mT


def resized(table: Tensor, size: tuple[int, ...]) -> Tensor:
    """Returns tables (h, n, H, W) interpolated (bilinear) to a size (H', W')."""
    if same_size(table.shape[2:], size):
        return table
    return F.interpolate(upcast(table), size=size, mode="bilinear", align_corners=False).to(table.dtype)
