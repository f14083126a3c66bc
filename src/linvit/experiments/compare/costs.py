"""What the models of runs cost, measured side by side: parameters, operations, time and memory."""

import importlib
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from linvit.entries import restrict_imports_to
from linvit.errors import UserError
from linvit.experiments.bench.costs import Cost, measure_costs
from linvit.experiments.bench.runner import Candidate, Settings
from linvit.experiments.measure import Timing
from linvit.image_size import image_size
from linvit.runs.folder import RunFolder
from linvit.tasks import Task
from linvit.tasks.base import SET_BY_DATA
from linvit.tasks.pretrained import skip_pretrained
from linvit.tasks.published import PublishedScores

BATCH = 2  # images: BatchNorm behind a pooling to one pixel cannot train on one


class Costs(NamedTuple):
    """Of a network, for one image.

    Attributes:
        parameters: Learnable parameters.
        macs: Multiply-accumulates of matrix products and convolutions.
        latency: Seconds of a forward pass per image, in batches of two.
        memory: Bytes that a forward and a backward pass of two images allocate at most, beyond the weights.
        published: What the authors of this very model published, if they did.
    """

    parameters: int
    macs: int
    latency: Timing
    memory: int
    published: PublishedScores | None


def measure(runs: Mapping[str, RunFolder], budget: float, device: str, imports: bool = True) -> dict[str, Costs | str]:
    """Builds the network of each run and measures it on a random image of the run's size; weights are random, too.

    Args:
        runs: By name.
        budget: Seconds for the timing of all.
        device: "cpu" or "cuda".
        imports: Whether classes that the runs' configurations name by their paths may be imported.

    Returns:
        By name, the costs, or why there are none.
    """
    found: dict[str, Costs | str] = {}
    published: dict[str, PublishedScores | None] = {}
    candidates = []
    for name, run in runs.items():
        try:
            with torch.random.fork_rng(devices=[]):
                network, size, published[name], channels = _network(run, imports)
        except Exception as error:  # one model that cannot be built keeps no other from the table
            found[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        candidates.append(
            Candidate(name, size, size[0] * size[1], partial(_with_images, network, device, channels=channels))
        )
    measured, _ = measure_costs(candidates, Settings(device=device, batch=BATCH), budget=budget)
    return found | {cost.name: _costs(cost, published[cost.name]) for cost in measured}


def _network(run: RunFolder, imports: bool) -> tuple[nn.Module, tuple[int, int], PublishedScores | None, int]:
    """The network of a run, the size of its images, the published scores, and the channels of its images."""
    path = run.config["model"]["class_path"]
    module, _, name = path.rpartition(".")
    task = getattr(importlib.import_module(module) if imports else sys.modules.get(module), name, None)
    if not isinstance(task, type) or not issubclass(task, Task):
        raise UserError(f"'{path}' is not a task that is imported already, and a report imports none")
    facts: dict[str, Any] = {fact: run.hparams[fact] for fact in SET_BY_DATA if fact in run.hparams}
    with skip_pretrained(), restrict_imports_to(run.config if imports else ()):
        built = task(**{**run.config["model"]["init_args"], **facts, "compile": False})
    return built.measurable_network(), image_size(facts["img_size"]), built.published(), facts.get("in_chans", 3)


def _with_images(
    network: nn.Module, device: str, size: tuple[int, int], channels: int = 3
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A network with images (2, C, H, W)."""
    return network, (torch.randn(BATCH, channels, *size, device=device),), {}


def _costs(cost: Cost, published: PublishedScores | None) -> Costs | str:
    """What was measured of a network, or why it was not."""
    latency, memory = cost.seconds.get("forward"), cost.peak.get("forward_backward")
    if cost.parameters is None or cost.macs is None or latency is None or memory is None:
        return cost.note or "interrupted"
    per_image = Timing(tuple(seconds / BATCH for seconds in latency.samples))
    return Costs(cost.parameters, cost.macs, per_image, memory, published)
