"""Costs of the models of runs, measured side by side: parameters, operations, time and memory."""

import importlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from linvit.analysis.recorder import observe
from linvit.errors import UserError
from linvit.experiments.bench.costs import Cost, Crossover, costs_by_size, crossover, measure_costs, of_images, times_of
from linvit.experiments.bench.runner import Settings
from linvit.image_size import image_size
from linvit.registry.entries import restrict_imports_to
from linvit.runs.folder import RunFolder
from linvit.tasks import Task
from linvit.tasks.base import SET_BY_DATA
from linvit.tasks.pretrained import skip_pretrained
from linvit.tasks.published import PublishedScores
from linvit.tasks.teacher import Teacher, given_options

BATCH = 2  # images: BatchNorm behind a pooling to one pixel cannot train on one


class Costs(NamedTuple):
    """Of a network, for one image."""

    numbers: dict[str, float]
    """By the names that they have in files: `parameters` that are learned; `macs`, multiply-accumulates of matrix
    products and convolutions; `latency_seconds`, the median of a forward pass per image in batches of two, and its
    quartiles; `memory_bytes` that a forward and a backward pass of two images allocate at most, beyond the weights;
    and where they are known `softmax_blocks` and `state_bytes`, which attention keeps of all keys and values, sum over
    layers (`Call.state`)."""
    published: PublishedScores | None  # of this very model, by its authors
    crossover: Crossover | None = None  # of a student with its teacher, over the side of the image


Built = tuple[nn.Module, tuple[int, int, int], PublishedScores | None]
"""A network, the images (C, H, W) that it takes, and its published scores."""


def measure(
    runs: Mapping[str, RunFolder],
    budget: float,
    device: str,
    imports: bool = True,
    teachers: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Costs | str]:
    """Returns costs of each run's network with random weights, and of `teachers` by students, or the reason."""
    found: dict[str, Costs | str] = {}
    built: dict[str, Built] = {}
    for name, run in runs.items():
        for one in dict.fromkeys([teachers.get(name, name), name]):  # a teacher once, before its students
            if one in built or one in found:
                continue
            try:
                with torch.random.fork_rng(devices=[]):
                    built[one] = _network(run, imports, teacher=one != name)
            except Exception as error:  # one model that cannot be built keeps no other from the table
                found[one] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    costs = [of_images(name, own, torch.randn(BATCH, *image, device=device)) for name, (own, image, _) in built.items()]
    measure_costs(costs, Settings(device=device, batch=BATCH), budget=budget)
    found |= {cost.name: _costs(cost, *built[cost.name]) for cost in costs}
    for name, teacher in teachers.items():
        if isinstance(own := found[name], Costs) and isinstance(found[teacher], Costs):
            pair = {one: built[one][0] for one in (teacher, name)}
            costs = costs_by_size(pair, torch.randn(built[name][1]), torch.device(device), budget / len(runs))
            found[name] = own._replace(crossover=crossover(times_of(costs, name), times_of(costs, teacher)))
    return found


def _network(run: RunFolder, imports: bool, teacher: bool) -> Built:
    """Returns the network of a run, or of its teacher."""
    path = run.config["model"]["class_path"]
    module, _, name = path.rpartition(".")
    task = getattr(importlib.import_module(module) if imports else sys.modules.get(module), name, None)
    if not isinstance(task, type) or not issubclass(task, Task):
        raise UserError(f"'{path}' is not a task that is imported already, and a report imports none")
    facts: dict[str, Any] = {fact: run.hparams[fact] for fact in SET_BY_DATA if fact in run.hparams}
    options = {**run.model, **facts, "compile": False}
    if teacher:
        options["attention"] = given_options(Teacher.of(options["teacher"])).get("attention")
    with skip_pretrained(), restrict_imports_to(run.config if imports else ()):
        built = task(**options)
    image = (facts.get("in_chans", 3), *image_size(facts["img_size"]))
    return built.measurable_network(), image, built.published()


def _costs(
    cost: Cost, network: nn.Module, image: tuple[int, int, int], published: PublishedScores | None
) -> Costs | str:
    """Returns the costs of a network, or the reason why they are missing."""
    latency, memory = cost.seconds.get("forward"), cost.peak.get("forward_backward")
    if cost.parameters is None or cost.macs is None or latency is None or memory is None:
        return cost.note or "interrupted"
    low, high = latency.quartiles
    numbers = {"parameters": cost.parameters, "macs": cost.macs, "latency_seconds": latency.median / BATCH}
    numbers |= {"latency_low": low / BATCH, "latency_high": high / BATCH, "memory_bytes": memory}
    if cost.softmax_blocks is not None:
        numbers["softmax_blocks"] = cost.softmax_blocks
    with suppress(Exception):  # no attention that linvit can look into, or too much of it
        numbers["state_bytes"] = sum(call.state() for call in observe(network.cpu(), torch.randn(1, *image)).values())
    return Costs(numbers, published)
