"""Steps of everything registered on the null device, one JSON line each: its name, launches, waits, and error.

`python -m tests.null_cuda.rehearse SUBJECT`, with the library of device.py preloaded.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loops import training_epoch_loop
from torch import Tensor, nn
from torch.nn import parallel

import linvit
import linvit.cli
from benchmarks import roofline
from linvit import Attention, AttentionLayer, Grid
from linvit.callbacks.save_checkpoints import AtomicCheckpointIO, SaveCheckpoints
from linvit.data.transforms.geometry import PixelOp, Warp
from linvit.data.transforms.on_device import apply_ops
from linvit.data.transforms.pixel_ops import OPERATIONS
from linvit.finite import not_finite
from linvit.registry import attentions, heads
from linvit.tasks.segmentation.scores import dice_loss, pixel_cross_entropy
from tests.families import kinds, narrow, small
from tests.helpers import own_names
from tests.null_cuda.device import Calls, reading_ones
from tests.one_rank import join

DEVICE = "cuda"
SIDE = 64
DETECTION_BATCH = 8
PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[], object]


class Sum(Attention):
    """q + v: an attention of another package, of one operator."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d), (B, h, N, d), (B, h, N, d) -> (B, h, N, d)."""
        return q + v


def mechanisms() -> Iterator[tuple[str, Step]]:
    """A training step of each mechanism in its layer, in every precision."""
    grid = Grid((8, 8))
    for name in sorted(own_names(attentions)):
        for precision, dtype in PRECISIONS.items():
            layer = AttentionLayer(64, 2, grid, attention=name).to(DEVICE).train()
            x = torch.zeros(2, 64, 64, device=DEVICE, requires_grad=True)
            yield f"{name} {precision}", training(lambda layer=layer, x=x: layer(x, grid), dtype)
        half = AttentionLayer(64, 2, grid, attention=name).to(DEVICE, torch.bfloat16).train()
        x = torch.zeros(2, 64, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        yield f"{name} bf16-true", training(lambda layer=half, x=x: layer(x, grid))


def networks() -> Iterator[tuple[str, Step]]:
    """A training step of a network of each family, and of one under each segmentation head with its losses."""
    images = torch.zeros(2, 3, SIDE, SIDE, device=DEVICE)
    for name in kinds():
        network = linvit.create_backbone(small(name), img_size=SIDE, num_classes=5).to(DEVICE).train()
        yield name, training(lambda network=network: network(images), torch.bfloat16)
    mask = torch.zeros(2, SIDE, SIDE, dtype=torch.long, device=DEVICE)
    for name in of_task("segmentation"):
        segmentor = linvit.create_segmentor(small("pvt_v2_b0"), narrow(name), 5, "linear", SIDE).to(DEVICE).train()

        def loss(segmentor: nn.Module = segmentor) -> Tensor:
            logits = segmentor(images)
            return pixel_cross_entropy(logits, mask) + dice_loss(logits, mask)

        yield name, training(loss, torch.bfloat16)


def augmentation() -> Iterator[tuple[str, Step]]:
    """Each operation that is left to the device, on a batch of four images."""
    images = torch.zeros(4, 3, SIDE, SIDE, dtype=torch.uint8, device=DEVICE)
    ops = [PixelOp(name, 0.5) for name in OPERATIONS]
    ops += [Warp(((1, 0, 2), (0, 1, 3)), bicubic, (0, 128, 255)) for bicubic in (False, True)]
    for op in ops:
        yield str(op), lambda op=op: apply_ops(images, [(op,), (), (op,), (op,)])


def detectors() -> Iterator[tuple[str, Step]]:
    """A training step and a step of evaluation of each detector, which finds an object in each of eight images."""
    images = list(torch.zeros(DETECTION_BATCH, 3, SIDE, SIDE, device=DEVICE))
    target = {
        "boxes": torch.tensor([[4.0, 4, 40, 40], [8.0, 8, 20, 20]]).to(DEVICE),
        "labels": torch.zeros(2, dtype=torch.long).to(DEVICE),
        "masks": torch.zeros(2, SIDE, SIDE, dtype=torch.uint8).to(DEVICE),
    }
    for name in of_task("detection"):
        detector = linvit.create_detector(small("pvt_v2_b0"), narrow(name), 5, "linear", SIDE).to(DEVICE).train()

        @reading_ones()
        def loss(detector: nn.Module = detector) -> Tensor:
            return sum(detector(images, [target] * len(images)).values())  # type: ignore[return-value]

        yield f"{name} training", training(loss, torch.bfloat16)

        @reading_ones()
        def detect(detector: nn.Module = detector) -> None:
            with torch.no_grad():
                for image in images:
                    detector.eval()([image])

        yield f"{name} evaluation", detect


def saving() -> Iterator[tuple[str, Step]]:
    """A checkpoint of tensors that share memory, and of a state dict with its metadata."""
    layer = nn.Linear(8, 8, device=DEVICE)
    whole = torch.zeros(6, device=DEVICE)
    content = {"state_dict": layer.state_dict(), "optimizer_states": [{"views": (whole[:2], whole.view(2, 3).mT)}]}

    def save() -> None:
        with tempfile.NamedTemporaryFile() as file:
            AtomicCheckpointIO().save_checkpoint(content, file.name)
            found = torch.load(file.name, weights_only=True)
        first, second = found["optimizer_states"][0]["views"]
        assert found["state_dict"]._metadata == content["state_dict"]._metadata
        assert not found["state_dict"]["weight"].is_cuda
        assert second.stride() == (1, 3)
        assert first.data_ptr() == second.data_ptr()

    yield "checkpoint", save
    yield "finite", lambda: not_finite(layer, content)


def planted() -> Iterator[tuple[str, Step]]:
    """What must be found: a tensor on another device, and a value that the host reads."""
    x = torch.zeros(8, device=DEVICE, requires_grad=True)
    yield "another device", training(lambda: x + torch.ones(8))
    yield "another dtype", training(lambda: x @ torch.ones(8, dtype=torch.float64, device=DEVICE))
    yield "item", training(lambda: x * float(x.sum().item()))
    conv = nn.Conv2d(4, 4, 3).to(DEVICE, torch.bfloat16)
    for count in (1, 8):
        images = torch.zeros(count, 4, 8, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        yield f"{count} convolved", training(lambda images=images: conv(images))
    yield from saving()


def training(forward: Callable[[], Tensor], dtype: torch.dtype | None = None) -> Step:
    """A forward pass, in mixed precision if there is a dtype, and a backward pass."""

    def step() -> None:
        with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            value = forward().float().sum()
        value.backward()

    return step


def of_task(task: str) -> list[str]:
    """The heads of a task."""
    return sorted(name for name in own_names(heads) if heads.get(name).task == task)


def fit(config: str) -> int:
    """`linvit fit` of a configuration on the null device: a line for each batch of training and of validation."""
    from lightning.pytorch.loops import evaluation_loop

    from linvit.cli import main

    for loop, name, kind in (
        (training_epoch_loop._TrainingEpochLoop, "advance", "training"),
        (evaluation_loop._EvaluationLoop, "_evaluation_step", "validation"),
    ):
        function = getattr(loop, name)
        setattr(loop, name, counted(function if kind == "training" else reading_ones()(function), kind))
    with tempfile.TemporaryDirectory() as folder:
        if ranks := [option for option in sys.argv if option.startswith("--trainer.num_nodes=")]:
            parallel.distributed._verify_param_shape_across_processes = lambda *_: (
                True
            )  # which reads values, and all are 0
            SaveCheckpoints.save = lambda *_: None  # there is no state of the others' optimisers
            join(0, int(ranks[0].partition("=")[2]), Path(folder) / "told")
        return main(["fit", f"--config={config}", f"--trainer.default_root_dir={folder}", *sys.argv[3:]])


def counted(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """The function, which prints what it asks of the device."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with Calls() as calls:
            found = function(*args, **kwargs)
        report(kind, calls)
        return found

    return wrapper


def report(name: str, calls: Calls, error: str = "") -> None:
    """Adds a line to the file that the environment names."""
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps({"name": name, "launches": calls.launches, "waits": calls.waits, "error": error}) + "\n")


def main() -> int:
    """Does each step twice, and counts the second time: what is kept from the first need not be made again."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # a graph of cuDNN's, which is not stood in for: torch's own kernel
    if sys.argv[1] == "roofline":
        return roofline.main(sys.argv[2:])
    if sys.argv[1] == "fit":
        return fit(sys.argv[2])
    if sys.argv[1] == "advise":
        return linvit.cli.main(sys.argv[1:])
    for name, step in globals()[sys.argv[1]]():
        error = ""
        with Calls() as first:
            try:
                step()
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
        if error:
            report(name, first, error)
            continue
        with Calls() as calls:
            step()
        report(name, calls)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread of autograd that still wants the interpreter while it ends would abort the process
