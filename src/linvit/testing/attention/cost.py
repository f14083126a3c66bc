"""Cost: as declared against as counted."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from linvit.attention.base import Attention, Grid
from linvit.attention.cost import Cost
from linvit.errors import UserError
from linvit.testing.attention.inputs import NOMINAL, Inputs, Subject, inputs, shown
from linvit.testing.report import Finding, failed, not_declared, passed

COSTED = (NOMINAL, Grid((14, 14), num_prefix=1), Grid((14, 14), (7, 7)))


def cost(subject: Subject) -> Finding:
    """The matmul part is what torch counts, and the parameters are those there are."""
    said, mechanism = "", subject.build()
    reducible = mechanism.fewer_keys and mechanism.projections == "qkv"
    for grid in COSTED if reducible else COSTED[:-1]:
        try:
            mechanism = subject.build(grid)
            counted = macs(mechanism, inputs(mechanism, grid, batch=1), grid)
        except UserError:  # the checks of shapes report it
            continue
        declared = mechanism.cost(grid)
        if declared is None:
            return not_declared(f"cost(grid) gives None; torch counts {counted} MACs at {shown(grid)}")
        wrong = _wrong_cost(mechanism, declared, counted)
        if wrong:
            return failed(f"{wrong} at {shown(grid)}")
        said = said or (
            f"{declared.matmul} matmul MACs as counted, {declared.elementwise} elementwise, "
            f"{declared.transcendental} transcendental, {declared.parameters} parameters at {shown(grid)}"
        )
    return passed(said) if said else failed("no grid to count at")


@torch.no_grad()
def macs(mechanism: Attention, given: Inputs, grid: Grid) -> int:
    """Multiply-accumulates of matrix products and convolutions, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        given(mechanism, grid)
    flops: int = counter.get_total_flops()
    return flops // 2


def _wrong_cost(mechanism: Attention, declared: Cost, counted: int) -> str:
    """What is wrong with a declared cost, or nothing."""
    there = sum(parameter.numel() for parameter in mechanism.parameters() if parameter.requires_grad)
    if declared.matmul != counted:
        return f"declared {declared.matmul} matmul MACs, torch counts {counted}"
    if declared.parameters != there:
        return f"declared {declared.parameters} parameters, there are {there}"
    if min(declared) < 0 or declared.total <= 0:
        return f"a cost of nothing or less: {declared}"
    return ""
