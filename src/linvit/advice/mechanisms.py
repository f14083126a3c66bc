"""Mechanisms that a network can have, in the order of their time, and the blocks that they are measured in."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from linvit.advice.bench import Bench, reason
from linvit.advice.subject import cores_of, without_cores
from linvit.advice.verdict import SIEVE, Measured
from linvit.analysis.operations import make_inputs, num_parameters
from linvit.attention.base import Attention, Grid
from linvit.attention.softmax import SoftmaxAttention
from linvit.experiments.bench.builders import spec_label
from linvit.experiments.bench.runner import Runner
from linvit.experiments.measure import Turns
from linvit.registry import Spec, attentions
from linvit.registry.layouts import LAYOUTS, expand_layout

FIRST_ROUND = 0.1  # of the time left, at most, to order mechanisms


def usual(bench: Bench, size: Measured) -> list[Spec]:
    """Returns mechanisms that project q, k and v, without stem and without parameters per token."""
    cores = cores_of(without_cores(bench.subject, bench.network(size.img_size), size.img_size))
    found: list[Spec] = []
    for name in attentions.names() if cores else ():
        try:
            with torch.device("meta"):
                one = _mechanism(name, cores[0], Grid((8, 8)))
                other = _mechanism(name, cores[0], Grid((12, 12)))
        except Exception:  # it needs options, or another width
            continue
        per_token = num_parameters(one) != num_parameters(other)
        if one.host.project == "qkv" and one.host.stem == "none" and not per_token:
            found.append(name)
    return found


def quickest(bench: Bench, specs: Iterable[Spec], size: Measured) -> list[Spec]:
    """Orders mechanisms by the time of one call alone, at the layer with most work, in two turns.

    Mechanisms that cannot be built there are left out.
    """
    cores = cores_of(without_cores(bench.subject, bench.network(size.img_size), size.img_size))
    if not cores:
        return []
    core = max(cores, key=lambda one: one.grid.num_queries * one.dim * (1 + one.grid.num_keys))
    turns, built = Turns[int](bench.settings.device, bench.clock), dict[int, Spec]()
    settings, end = bench.settings._replace(optimizer=False), bench.now() + FIRST_ROUND * bench.left
    failed, late = dict[str, list[str]](), list[str]()  # labels of mechanisms by reason

    def make(*shape: int) -> torch.Tensor:
        made = torch.randn(settings.batch, *shape).to(settings.device, settings.weights)
        return made.requires_grad_(settings.backward)

    for i, spec in enumerate(specs):
        bench.say(f"first round: {spec_label(spec)}")
        if bench.now() > end and built:
            late.append(spec_label(spec))
            continue
        try:
            mechanism = _mechanism(spec, core, core.grid)
            if mechanism.facts.complexity == "O(N^2)":
                continue
            inputs, extra = make_inputs(mechanism, core.grid, make)
            turns.add(i, getattr(Runner(mechanism, inputs, extra, settings), settings.passes[-1]))
            built[i] = spec
        except Exception as error:
            failed.setdefault(reason(error), []).append(spec_label(spec))
    if late:
        failed["the first round took too long"] = late
    size.notes += [f"{', '.join(labels)}: left out, {why}" for why, labels in failed.items()]
    for _ in range(SIEVE):
        for _ in turns.round([*built]):
            pass
    return [built[i] for i in sorted(built, key=lambda i: sum(turns.times[i]))]


def _mechanism(spec: Spec, core: Attention, grid: Grid) -> Attention:
    """Returns a mechanism for the layer of a core."""
    narrow = {} if core.key_dim == core.head_dim else {"key_dim": core.key_dim}
    made: Attention = attentions.create(spec, dim=core.dim, num_heads=core.num_heads, grid=grid, **narrow)
    return made


def other_attention(network: nn.Module) -> list[str]:
    """Returns the classes of mechanisms other than softmax that a network has already."""
    mechanisms = [module for module in network.modules() if isinstance(module, Attention)]
    return list(dict.fromkeys(type(one).__name__ for one in mechanisms if not isinstance(one, SoftmaxAttention)))


def specs_of(layout: Any, blocks: int, softmax: bool) -> list[Any]:
    """Returns the specs of a layout for a network that has `softmax` in all blocks or not; None keeps a block's."""
    return [None if softmax and spec == "softmax" else spec for spec in expand_layout(layout, blocks)]


def placements(spec: Spec, blocks: int, softmax: bool, window: int | None) -> list[tuple[str, str, list[Any]]]:
    """Returns names, placements and specs of a mechanism in all blocks, in all but the last two, in the first half.

    Then in JetViT's layout, if there is a window, for so many blocks. Other blocks keep their attention, `softmax` or
    not.
    """
    name = spec_label(spec)
    found: list[tuple[str, str, list[Any]]] = [(f"{name} in all {blocks} blocks", "all", [spec] * blocks)]
    for kept in dict.fromkeys([2, blocks - blocks // 2]):
        if 0 < kept < blocks:
            row_name = f"{name}, last {kept} of {blocks} {'softmax' if softmax else 'unchanged'}"
            found.append((row_name, f"last {kept}", [spec] * (blocks - kept) + [None] * kept))
    if window and blocks in LAYOUTS["jetvit"].full:
        specs = specs_of({"layout": "jetvit", "linear": spec, "window": window}, blocks, softmax)
        found.append((f"{name}, windows and softmax, layout jetvit", "jetvit", specs))
    return found
