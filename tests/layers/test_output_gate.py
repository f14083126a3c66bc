"""Gate and stem keep for backward no more than their inputs, and give the gradients of the plain formulas."""

import torch
from torch.nn import functional as F

from linvit import Grid
from linvit.analysis.operations import kept_for_backward
from linvit.layers.hosting import ConvStem, OutputGate
from tests.helpers import assert_same_gradients, perturb, randn


def test_gate_with_silu_keeps_the_output_and_its_linear_map() -> None:
    gate = perturb(OutputGate(6, 8, silu=True).double())
    out, x = randn(2, 5, 8, grad=True), randn(2, 5, 6, seed=1, grad=True)
    want = out * F.silu(F.linear(x, gate.weight, gate.bias))
    assert_same_gradients(gate(out, x), want, [out, x, *gate.parameters()], 1e-13)
    assert kept_for_backward(lambda: gate(out, x), gate) == x.nbytes + 2 * out.nbytes


def test_stem_keeps_its_input_and_its_linear_map() -> None:
    grid = Grid((3, 4), num_prefix=1)
    stem = perturb(ConvStem(6).double())
    x = randn(2, 13, 6, grad=True)
    t = F.linear(x, stem.in_proj.weight, stem.in_proj.bias)
    local = F.conv2d(t[:, 1:].mT.unflatten(2, (3, 4)), stem.conv.weight, stem.conv.bias, padding=1, groups=6)
    want = F.silu(torch.cat([t[:, :1], local.flatten(2).mT], dim=1))
    assert_same_gradients(stem(x, grid), want, [x, *stem.parameters()], 1e-13)
    assert kept_for_backward(lambda: stem(x, grid), stem) == 2 * x.nbytes
