"""Cost: what one forward pass computes, and what training keeps of it."""

from functools import partial

import torch

from linvit.analysis.kept_for_backward import kept_for_backward
from linvit.analysis.operations import Operations, count_operations
from linvit.attention.base import Attention
from linvit.testing.attention.inputs import NOMINAL, AttentionSubject, Inputs, inputs
from linvit.testing.report import Line, Verdict, failed, passed
from linvit.testing.subject import sized

FEW = 3
"""Times its inputs that a mechanism may keep without advice: a copy of them in float32 under autocast."""


def cost(subject: AttentionSubject) -> Line:
    """The operations of one image, counted; `growth.growth_of_work` judges how they grow."""
    mechanism = subject.build()
    counted = operations(mechanism, inputs(mechanism, NOMINAL, batch=1))
    said = (
        f"{counted.matmul} matmul MACs, {counted.elementwise} elementwise operations, {counted.parameters} "
        f"parameters at {sized(NOMINAL)}"
    )
    return passed(said) if counted.total else failed(f"no operation was seen at {sized(NOMINAL)}")


def kept(subject: AttentionSubject) -> Line:
    """Measures what is kept for backward in float32 and under bfloat16 autocast, as a multiple of the inputs."""
    mechanism = subject.build(dtype=torch.float32)
    said = []
    for autocast, name in ((False, "float32"), (True, "bfloat16 autocast")):
        dtype = torch.bfloat16 if autocast else torch.float32
        given = inputs(mechanism, NOMINAL, batch=1, dtype=dtype).map(lambda x: x.requires_grad_())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            bytes_kept = kept_for_backward(partial(Inputs.__call__, given, mechanism), mechanism)
        times = bytes_kept / sum(tensor.nbytes for tensor in given.named.values())
        said.append(f"{bytes_kept / 2**10:.0f} KiB in {name}, {times:.1f} times its inputs")
    hint = "" if times <= FEW else "; @linvit.recomputed above @linvit.full_precision keeps the inputs alone"
    return Line("", Verdict.MEASURED, f"{'; '.join(said)} at {sized(NOMINAL)}{hint}")


def operations(mechanism: Attention, given: Inputs) -> Operations:
    """Counts the operations of a mechanism's forward pass."""
    return count_operations(mechanism, given.q, given.k, given.v, given.grid, **given.extra)
