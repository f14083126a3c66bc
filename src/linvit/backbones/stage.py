"""One level of a feature pyramid: embed, add positions, run the blocks; and the specs of the blocks."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from linvit.attention.base import Grid, Packed
from linvit.attention.ops.functional import SizeOf, resize_table, resize_tokens, same_size
from linvit.errors import UserError
from linvit.registry import Spec
from linvit.registry.layouts import expand_layout, is_layout

T = TypeVar("T", bound=Spec | None)


class Stage(nn.Module):
    """One level of a pyramid: turns a plane (B, C, H, W) into tokens (B, N, dim) and their grid.

    A class token joins where the nominal `grid` has a prefix. `embed` makes tokens and their patch grid of the plane.
    `positions` adds a learnable embedding per token of the nominal grid, interpolated (bilinear) for another one;
    `spare_position` begins their table with a row that no token has.
    """

    def __init__(
        self,
        dim: int,
        grid: Grid,
        embed: nn.Module,
        blocks: Iterable[nn.Module],
        positions: bool = False,
        norm: nn.Module | None = None,
        spare_position: bool = False,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.grad_checkpointing = False
        self.embed = embed
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if grid.num_prefix else None
        self.pos_embed = nn.Parameter(torch.zeros(1, spare_position + grid.num_queries, dim)) if positions else None
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.Identity() if norm is None else norm
        for table in (self.cls_token, self.pos_embed):
            if table is not None:
                trunc_normal_(table, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """(B, C, H, W) -> (B, N, dim) and the grid of these tokens."""
        x, size = self.embed(x)
        grid = Grid(size, num_prefix=self.grid.num_prefix)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        if self.pos_embed is not None:
            x = x + resize_positions(self.pos_embed, self.grid, grid)
        x = run_blocks(self.blocks, x, grid, self.grad_checkpointing and self.training)
        return self.norm(x), grid

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Returns a checkpoint's positions for the nominal grid (bilinear); see `linvit.Attention.resize_tables`."""
        if self.pos_embed is not None and "pos_embed" in state:
            state["pos_embed"] = resize_table(state["pos_embed"], self.pos_embed, self.grid.size, size_of, "bilinear")
        return state


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, grid: Grid | Packed, checkpointing: bool) -> Tensor:
    """Runs blocks one after the other, with gradient checkpointing of each if asked for."""
    for block in blocks:
        call = partial(uncompiled, block) if isinstance(grid, Packed) else block
        if not checkpointing:
            x = call(x, grid)
        elif torch.compiler.is_compiling():
            x = checkpoint(call, x, grid, use_reentrant=False)
        else:
            x = checkpoint(call, x, grid, use_reentrant=False, context_fn=partial(_passes, block))
    return x


def uncompiled(block: nn.Module, *given: Any) -> Tensor:
    """Calls a block without `torch.compile`, for packs: each new size would be another graph."""
    with torch.compiler.set_stance("force_eager"):
        return block(*given)  # type: ignore[no-any-return]


def _passes(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a block's two passes: BatchNorm counts the batch in the first alone."""
    return nullcontext(), _kept_statistics(block)


@contextmanager
def _kept_statistics(block: nn.Module) -> Iterator[None]:
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    kept = [dict(norm._buffers) for norm in norms]
    try:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update({name: None if one is None else one.clone() for name, one in buffers.items()})
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def resize_positions(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Interpolates (bilinear) a position table (1, N, C) from one grid to another; positions of the prefix stay."""
    table = table[:, -old.num_queries :]  # without a row that no token has
    if same_size(old.size, new.size):
        return table
    prefix, patches = table[:, : old.num_prefix], table[:, old.num_prefix :]
    return torch.cat([prefix, resize_tokens(patches, old.size, new.size, mode="bilinear")], dim=1)


def stage_grids(img_size: tuple[int, int], strides: Sequence[int] = (4, 2, 2, 2)) -> list[tuple[int, int]]:
    """Returns the patch grid of each stage for an image size; sides are rounded up at every stage."""
    height, width = img_size
    grids = []
    for stride in strides:
        height, width = -(-height // stride), -(-width // stride)
        grids.append((height, width))
    return grids


def pyramid_info(dims: Sequence[int], stride: int = 4) -> list[dict[str, str | int]]:
    """Returns the `feature_info` of stages with these channels; the first has this stride, each next twice as much."""
    return [{"module": f"stages.{i}", "num_chs": dim, "reduction": stride * 2**i} for i, dim in enumerate(dims)]


def specs_per_block(attention: Spec | Sequence[T], depths: Sequence[int]) -> list[Spec | T]:
    """Returns one attention spec per block, given one for all, one per stage, one per block, or a layout's name."""
    total = sum(depths)
    if is_layout(attention):
        layout: list[Any] = list(expand_layout(cast("Mapping[str, Any]", attention), total))
        return layout
    if isinstance(attention, str | Mapping) or not isinstance(attention, Sequence):
        return [attention] * total
    if len(attention) == total:
        return list(attention)
    if len(attention) == len(depths):
        found: list[Any] = []
        for spec, depth in zip(attention, depths, strict=True):
            found += [spec] * depth
        return found
    raise UserError(
        f"attention lists {len(attention)} specs, but this backbone has {total} block(s) in {len(depths)} stage(s). "
        f"Give one spec for all, {len(depths)} (one per stage), or {total} (one per block)"
    )


def specs_per_layer(
    attention: Spec | Sequence[Spec | None], network: nn.Module, names: Collection[str]
) -> list[Spec | None]:
    """Returns one spec per attention layer of a model that is already built; see `specs_per_block`.

    Its stages are those of its `feature_info`, if it has one.
    """
    levels: Any = getattr(network, "feature_info", ())
    depths = [sum(name.startswith(f"{level['module']}.") for name in names) for level in levels]
    if sum(depths) != len(names) or max(depths) == 1:  # every block of a plain transformer is a level
        depths = [len(names)]
    return specs_per_block(attention, depths)


def specs_and_rates(
    attention: Spec | Sequence[Spec], drop_path_rate: float, depths: Sequence[int]
) -> tuple[list[list[Spec]], list[list[float]]]:
    """Returns the specs (see `specs_per_block`) and the rates of stochastic depth of the blocks of each stage.

    Rates grow linearly from 0 at the first block to `drop_path_rate` at the last of all.
    """
    specs = iter(specs_per_block(attention, depths))
    rates = iter(torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist())
    return [list(islice(specs, depth)) for depth in depths], [list(islice(rates, depth)) for depth in depths]
