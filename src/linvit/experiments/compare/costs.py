"""What the models of runs cost, measured side by side: parameters, operations, time and memory."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linvit.analysis import count_operations
from linvit.experiments.compare.runs import Run
from linvit.experiments.measure import Timing, interleaved, peak_memory
from linvit.image_size import image_size
from linvit.tasks import Task
from linvit.tasks.base import SET_BY_DATA
from linvit.tasks.pretrained import checkpoint_follows
from linvit.tasks.published import Published


class Costs(NamedTuple):
    """Of a network, for one image.

    Attributes:
        parameters: Learnable parameters.
        macs: Multiply-accumulates of matrix products and convolutions.
        latency: Seconds of a forward pass.
        memory: Bytes that a forward and backward pass allocates at most, beyond weights and gradients.
        published: What the authors of this very model published, if they did.
    """

    parameters: int
    macs: int
    latency: Timing
    memory: int
    published: Published | None


def measure(runs: Mapping[str, Run], budget: float, device: str) -> dict[str, Costs | str]:
    """Builds the network of each run and measures it on a random image of the run's size; weights are random, too.

    Args:
        runs: By name.
        budget: Seconds for the timing of all.
        device: "cpu" or "cuda".

    Returns:
        By name, the costs, or why there are none.
    """
    found: dict[str, Costs | str] = {}
    networks: dict[str, tuple[nn.Module, Tensor, Published | None]] = {}
    for name, run in runs.items():
        try:
            with torch.random.fork_rng(devices=[]):
                networks[name] = _network(run, device)
        except Exception as error:  # one model that cannot be built keeps no other from the table
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    timings = interleaved(
        {name: _forward(network, image) for name, (network, image, _) in networks.items()}, budget=budget, device=device
    )
    for name, (network, image, published) in networks.items():
        work = _backward(network, image)
        work()
        memory = peak_memory(work, device)
        network.zero_grad(set_to_none=True)
        operations = count_operations(network, image)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        found[name] = Costs(parameters, operations.matmul, timings[name], memory, published)
    return found


def _network(run: Run, device: str) -> tuple[nn.Module, Tensor, Published | None]:
    """The network of a run, in evaluation mode, an image (1, 3, H, W), and the published scores."""
    module, _, name = run.config["model"]["class_path"].rpartition(".")
    task: type[Task] = getattr(importlib.import_module(module), name)
    facts: dict[str, Any] = {fact: run.hparams[fact] for fact in SET_BY_DATA if fact in run.hparams}
    with checkpoint_follows():
        built = task(**{**run.config["model"]["init_args"], **facts, "compile": False})
    height, width = image_size(facts["img_size"])
    image = torch.randn(1, 3, height, width, device=device)
    return built.network.to(device).eval(), image, built.published()


def _forward(network: nn.Module, image: Tensor) -> Callable[[], None]:
    def work() -> None:
        with torch.no_grad():
            network(image)

    return work


def _backward(network: nn.Module, image: Tensor) -> Callable[[], None]:
    def work() -> None:
        output = network(image)
        (output.sum() if isinstance(output, Tensor) else sum(part.sum() for part in output)).backward()

    return work
