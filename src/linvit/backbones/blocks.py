"""What each block of a backbone gets: its attention, and its rate of stochastic depth."""

from collections.abc import Mapping, Sequence
from itertools import islice

import torch

from linvit.errors import UserError
from linvit.registry import Spec


def specs_per_block(attention: Spec | Sequence[Spec], depths: Sequence[int]) -> list[Spec]:
    """One attention spec per block from one for all, one per stage, or one per block.

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
        return [spec for spec, depth in zip(attention, depths, strict=True) for _ in range(depth)]
    raise UserError(
        f"attention lists {len(attention)} specs, but this backbone has {total} block(s) in {len(depths)} stage(s). "
        f"Give one spec for all, {len(depths)} (one per stage), or {total} (one per block)"
    )


def specs_and_rates(
    attention: Spec | Sequence[Spec], drop_path_rate: float, depths: Sequence[int]
) -> tuple[list[list[Spec]], list[list[float]]]:
    """Attention specs, and rates of stochastic depth, of the blocks of each stage.

    Args:
        attention: A spec or a list of specs; see `specs_per_block`.
        drop_path_rate: Of the last block of all; linear from 0 at the first.
        depths: Blocks per stage.
    """
    specs = iter(specs_per_block(attention, depths))
    rates = iter(torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist())
    return [list(islice(specs, depth)) for depth in depths], [list(islice(rates, depth)) for depth in depths]
