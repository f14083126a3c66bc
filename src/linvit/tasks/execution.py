"""Execution of a network: precision, memory, and the selection of weights to train."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, distributed, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_sum

from linvit.analysis.operations import kept_for_backward
from linvit.attention.kernels.choice import set_attention_kernel
from linvit.backbones.initialise import classifiers
from linvit.callbacks.save_checkpoints import on_cpu
from linvit.errors import UserError, quote_first
from linvit.tasks.optimisation import Optimisation
from linvit.tasks.pretrained import checkpoint_follows


def freeze_parameters(network: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Freezes the parameters whose names match one of the patterns; returns the modules that are frozen whole.

    The patterns are those of a shell, of names of parameters or modules: "stages.0", "*.mlp". Names may have the
    "backbone." that they have below a head, or not; a classifier is not of the backbone. The modules are in evaluation
    mode. A `UserError` says if a pattern matches no parameter, or if none is left to train.
    """
    if not patterns:
        return []
    parameters = dict(network.named_parameters())
    of_head = {id(parameter) for module in classifiers(network) for parameter in module.parameters()}
    names = {name: {name, name.removeprefix("backbone.")} for name in parameters}
    if not hasattr(network, "backbone"):
        names |= {name: {name, f"backbone.{name}"} for name, one in parameters.items() if id(one) not in of_head}
    for pattern in patterns:
        ways = (pattern, f"{pattern}.*")
        matched = [name for name, own in names.items() if any(fnmatchcase(one, way) for one in own for way in ways)]
        if not matched:
            some = ", ".join(list(parameters)[:: max(1, len(parameters) // 4)])
            raise UserError(f"freeze: no parameter of the network is called {pattern!r}. Names are like {some}")
        for name in matched:
            parameters[name].requires_grad_(False)
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if len(frozen) == len(parameters):
        raise UserError(f"freeze: {list(patterns)} leave no parameter to train")
    rank_zero_info(f"frozen: {len(frozen)} of {len(parameters)} tensors of parameters: {quote_first(frozen)}")
    whole = [
        module
        for module in network.modules()
        if list(module.parameters()) and not any(parameter.requires_grad for parameter in module.parameters())
    ]
    for module in whole:
        module.eval()  # BatchNorm keeps its statistics, dropout is off
    return whole


def enable_grad_checkpointing(network: nn.Module) -> None:
    """Lets a network, or its direct parts such as a backbone, compute activations again in the backward pass."""
    candidates = [network] if hasattr(network, "set_grad_checkpointing") else network.children()
    parts = [part for part in candidates if hasattr(part, "set_grad_checkpointing")]
    try:
        for part in parts:
            part.set_grad_checkpointing(True)  # type: ignore[operator]
        supported = bool(parts)
    except AssertionError:  # how timm's models refuse it
        supported = False
    if not supported:
        raise UserError(
            f"{type(network).__name__} has no gradient checkpointing; set --model.grad_checkpointing=false and lower "
            f"--data.batch_size, with --trainer.accumulate_grad_batches to make up for it"
        )


def add_up_over_ranks(metrics: nn.Module) -> None:
    """Makes ranks add up metrics whose states are sums; else each would collect 1,024 confusion matrices."""
    for metric in metrics.modules():
        if isinstance(metric, Metric) and all(reduction is dim_zero_sum for reduction in metric._reductions.values()):
            metric.dist_sync_fn = _summed_over_ranks


def _summed_over_ranks(own: Tensor, group: Any = None) -> list[Tensor]:
    """Returns the sum as the list that metrics expect; a function, since a metric is pickled with it."""
    return [total_over_ranks(own, group)]


def total_over_ranks(own: Tensor, group: Any = None) -> Tensor:
    """Returns the sum over ranks; all must call it. Lightning's `reduce` would also synchronise the host."""
    total = own.detach().clone()
    distributed.all_reduce(total, group=group)
    return total


def log_at_once(trainer: Trainer) -> None:
    """Synchronises with the device once for all logged values of a step or an epoch, not for each."""
    connector = trainer._logger_connector
    write = type(connector).log_metrics

    def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
        write(connector, on_cpu(metrics), step)

    connector.log_metrics = log_metrics  # type: ignore[method-assign]


class SharedScore(Metric):
    """One of the `figures()` of a shared state, such as a confusion matrix; `update` each after the state."""

    full_state_update = False
    higher_is_better = True

    def __init__(self, state: Any, name: str) -> None:
        super().__init__()
        self.state = state
        self.name = name

    def update(self) -> None:
        """Marks the state as updated."""

    def compute(self) -> Tensor:
        """Returns the score, a scalar."""
        return torch.as_tensor(self.state.figures()[self.name], dtype=torch.float32, device=self.device)

    def reset(self) -> None:
        """Resets the metric and its state."""
        super().reset()
        self.state.reset()


def keep_attention_features(network: nn.Module) -> None:
    """Lets attention, its stems and its gates store the tensors for the backward pass (`recompute` of the modules)."""
    for module in network.modules():
        if hasattr(module, "recompute"):
            module.recompute = False  # type: ignore[assignment]


@dataclass(eq=False)
class Execution(Callback):
    """Options of `Task` that change how its network is computed, not its results; a callback of its runs."""

    compile: bool
    float32_matmul_precision: str
    grad_checkpointing: bool
    recompute_attention: bool | Literal["auto"]
    attention_kernel: str
    _chosen = False

    def apply(self, task: Any) -> None:
        """Chooses kernels, turns on checkpointing and compiles, for a task's network and its moving average."""
        try:
            set_attention_kernel(task, self.attention_kernel)
        except UserError as error:  # a trained network may run on another machine
            if not checkpoint_follows():
                raise
            rank_zero_warn(f"torch computes attention: {error}")
        if self.grad_checkpointing:
            enable_grad_checkpointing(task.network)
        if self.recompute_attention is False:
            keep_attention_features(task.network)
        if self.compile:  # in place, so that no name of a weight changes
            for network in [task.network] if task.ema is None else [task.network, task.ema.network]:
                network.compile()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets the precision of products."""
        self._outside = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.float32_matmul_precision)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the precision of products."""
        torch.set_float32_matmul_precision(self._outside)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Any], batch_idx: int
    ) -> None:
        """Lets attention keep its features (`recompute_attention: auto`) on a GPU that has the memory, and says so.

        The memory that a step would keep is measured once, at the first batch, with two images in a copy of the
        network; it may take half of the memory left by gradients and averages of the weights. Compiled networks choose
        themselves; sharded ones, and checkpointing, are short of memory.
        """
        device, sharded = pl_module.device, isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        if self._chosen or sharded or device.type != "cuda" or self.compile or self.grad_checkpointing:
            return
        self._chosen = True
        if self.recompute_attention == "auto":
            needed = self.needed(trainer, pl_module, batch)
            own = sum(weight.nbytes for weight in pl_module.parameters() if weight.requires_grad)
            free = torch.cuda.mem_get_info(device)[0] - 3 * own
            if keeps := needed < free / 2:
                keep_attention_features(pl_module)
            rank_zero_info(
                f"recompute_attention=auto: attention {'keeps' if keeps else 'recomputes'} its features; a step that "
                f"keeps them takes about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
            )

    @staticmethod
    def needed(trainer: Trainer, task: Any, batch: dict[str, Any]) -> float:
        """Returns bytes that a step keeps for its backward pass if attention keeps its features."""
        network = copy.deepcopy(task.measurable_network()).train()
        keep_attention_features(network)
        images: Tensor = task.example_images.to(task.device).expand(2, -1, -1, -1)
        devices = [task.device] if task.device.type == "cuda" else []
        with torch.random.fork_rng(devices), trainer.precision_plugin.forward_context():
            kept = kept_for_backward(lambda: network(images), network)
        pixels: int = sum(image[0].numel() for image in batch["image"])
        return kept * pixels / float(images[:, 0].numel())


# Options of a task that a checkpoint does not decide:
SET_BY_RUN = ("predict_with", "teacher", *(one.name for one in fields(Execution)))
# Options of a task that do not change its trained network:
OF_TRAINING = {*SET_BY_RUN, "pretrained", "freeze", "ema_decay", "mesa", *(one.name for one in fields(Optimisation))}
