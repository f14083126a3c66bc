"""The attention and the rate of stochastic depth of each block."""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

from linvit.errors import UserError
from linvit.registry import Spec

T = TypeVar("T", bound=Spec | None)


def specs_per_block(attention: Spec | Sequence[T], depths: Sequence[int]) -> list[Spec | T]:
    """Returns one attention spec per block, given one for all, one per stage, or one per block.

    Args:
        attention: A spec or a list of specs.
        depths: Blocks per stage.

    Raises:
        UserError: If a list fits neither the stages nor the blocks.
    """
    total = sum(depths)
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
