"""Says where the numbers of a batch that are not finite come from."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from linvit.analysis.non_finite import bad_samples, find_non_finite
from linvit.callbacks.common import gather
from linvit.errors import quote_first
from linvit.finite import not_finite


class Report(NamedTuple):
    """What a batch was found to hold.

    Attributes:
        text: What is said of it, without a full stop.
        weights: Whether the weights themselves are not finite, so that no step can follow.
    """

    text: str
    weights: bool


def report(trainer: Trainer, task: LightningModule, batch: Any, layers: bool) -> Report:
    """Computes a batch once more and names the first layer whose output or gradient is not finite, and the samples.

    Weights, gradients, buffers and random generators stay as they are. It is called on all devices, and returns the
    same on all of them.

    Args:
        trainer: Of the run.
        task: With a `network` and a `training_loss`.
        batch: With `id`, the names of its samples, or `index`, their rows, if the data has them.
        layers: Whether the network can be run by itself, as a part of a sharded one cannot.
    """
    weights = not_finite(task, {"state_dict": dict(task.named_parameters())})
    found = [_layer(trainer, task, batch)] if layers else []
    if weights:
        found.append(f"the weights {quote_first(weights, 3)} are not finite")
    mine = Report("; ".join(part for part in found if part), bool(weights))
    everyone = gather(mine, trainer)
    on = "On rank {}: " if len(everyone) > 1 else ""
    texts = [on.format(rank) + text for rank, (text, _) in enumerate(everyone) if text]
    return Report(texts[0] if texts else NOTHING, any(one.weights for one in everyone))


NOTHING = "Computed once more, the batch was finite"


def _layer(trainer: Trainer, task: LightningModule, batch: dict[str, Any]) -> str:
    """Names the first layer and the samples; empty if all is finite."""
    size = len(batch["image"])
    inputs = {
        name: rows
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.is_floating_point() and (rows := bad_samples(value, size))
    }
    scaler = getattr(trainer.precision_plugin, "scaler", None)

    def loss() -> Tensor:
        with trainer.precision_plugin.train_step_context():
            value: Tensor = task.training_loss(batch)  # type: ignore[operator]
        return value if scaler is None else value * scaler.get_scale()

    try:
        with isolate_rng(), _buffers_kept(task), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            first = find_non_finite(task.network, loss, size)  # type: ignore[arg-type]
    except Exception as error:  # out of memory, for one: what is known is said
        return f"The batch could not be computed once more ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if first is None:
        return ""
    rows = next(iter(inputs.values()), first.samples) or list(range(size))
    given = f"; the data itself is not finite there ({', '.join(inputs)})" if inputs else ""
    return f"The first is {first.where}, for {len(rows)} of {size} samples: {quote_first(_names(batch, rows))}{given}"


def _names(batch: dict[str, Any], rows: list[int]) -> list[str]:
    """What the data calls samples of a batch: `id`, `index`, or else their numbers in the batch."""
    names = batch.get("id", batch.get("index"))
    return [str(row) if names is None else str(names[row]) for row in rows]


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
