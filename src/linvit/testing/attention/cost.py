"""Cost: what one forward pass computes."""

from linvit.analysis.operations import Operations, count_operations
from linvit.attention.base import Attention, Grid
from linvit.testing.attention.inputs import NOMINAL, Inputs, Subject, inputs, shown
from linvit.testing.report import Finding, failed, passed


def cost(subject: Subject) -> Finding:
    """The operations of one image, counted; how they grow is for `growth.growth_of_work` to judge."""
    mechanism = subject.build()
    counted = operations(mechanism, inputs(mechanism, NOMINAL, batch=1), NOMINAL)
    said = (
        f"{counted.matmul} matmul MACs, {counted.elementwise} elementwise, {counted.transcendental} transcendental, "
        f"{counted.parameters} parameters at {shown(NOMINAL)}"
    )
    if counted.unknown:
        said += f"; unknown operators, counted by their outputs: {', '.join(counted.unknown)}"
    return passed(said) if counted.total else failed(f"no operation was seen at {shown(NOMINAL)}")


def operations(mechanism: Attention, given: Inputs, grid: Grid) -> Operations:
    """Counts the operations of a mechanism's forward pass."""
    return count_operations(mechanism, given.q, given.k, given.v, grid, **given.extra)
