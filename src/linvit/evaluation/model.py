"""The model to evaluate: a run, an exported file, or a model of timm."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import timm
import torch
from lightning.pytorch.utilities import rank_zero_warn
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
from torch import Tensor

import linvit.backbones  # noqa: F401  (makes its names known to timm)
from linvit.errors import UserError
from linvit.inference.description import ModelDescription, build_task, read_trained, task_class
from linvit.inference.export import DESCRIPTION, SUFFIXES, run_onnx
from linvit.inference.onnx import require
from linvit.inference.preprocessing import Preprocessing
from linvit.io.reading import check_regular, read_regular
from linvit.tasks import ClassificationTask

TIMM = "timm:"
Network = Callable[[Tensor], Tensor]


class EvaluatedModel(NamedTuple):
    """Classifier that maps images (B, C, H, W), normalised unless it `takes_pixels`, to logits."""

    network: Network
    classes: list[str]
    preprocessing: Preprocessing
    takes_pixels: bool = False

    def __call__(self, pixels: Tensor) -> Tensor:
        """Maps images from 0 to 255 to logits (B, K)."""
        return self.network(pixels if self.takes_pixels else self.preprocessing.normalise(pixels))


def read_model(name: str, device: torch.device) -> EvaluatedModel:
    """Reads a run, a checkpoint, an output of `linvit push` or `linvit export` (also `.pt2`), or `timm:NAME`."""
    if name.startswith(TIMM):
        return _of_timm(name.removeprefix(TIMM), device)
    exported, takes_pixels = Path(name).suffix in SUFFIXES, False
    if exported:
        network, description, takes_pixels = _of_file(Path(name), device)
    else:
        description, state = read_trained(name)
    if not issubclass(task_class(description.task), ClassificationTask):
        raise UserError(f"linvit evaluate is for classification; use linvit test for {description.task} of '{name}'")
    if description.preprocessing is None:
        raise UserError(f"'{name}' has no description of its preprocessing")
    if not exported:
        network = build_task(description, state, name).network.to(device)
    return EvaluatedModel(network, description.class_names, Preprocessing.of(description.preprocessing), takes_pixels)


def _of_file(path: Path, device: torch.device) -> tuple[Network, ModelDescription, bool]:
    network: Network
    try:
        if path.suffix == ".onnx":
            (onnx,) = require("onnx")
            content = read_regular(path)
            said = {each.key: each.value for each in onnx.load_from_string(content).metadata_props}
            run = run_onnx(content)
            network = lambda images: run(images.cpu())  # noqa: E731
        else:
            extra = {DESCRIPTION: ""}
            check_regular(path)
            network = torch.export.load(path, extra_files=extra).module().to(device)
            said = json.loads(extra[DESCRIPTION])
        description = ModelDescription.from_dict(json.loads(said["description"]), path)
    except UserError:
        raise
    except Exception as error:  # files of any content
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"'{path}' was not written by linvit export: {reason}") from error
    return network, description, "normalised" not in said["images"]


def _of_timm(name: str, device: torch.device) -> EvaluatedModel:
    try:
        network = timm.create_model(name, pretrained=True).eval().to(device)
    except Exception as error:  # also errors of the hub
        raise UserError(f"timm has no trained '{name}': {str(error).partition(chr(10))[0]}") from error
    given: Any = resolve_data_config(model=network)  # type: ignore[no-untyped-call]
    if given["interpolation"] != "bicubic":
        rank_zero_warn(
            f"timm resizes images of '{name}' by {given['interpolation']} interpolation, and linvit evaluate by "
            f"bicubic: scores differ from timm's"
        )
    known, count = infer_imagenet_subset(network), int(cast("Any", network).num_classes)
    classes: Any = ImageNetInfo(known).label_names() if known else map(str, range(count))  # type: ignore[no-untyped-call]
    options = {key: given[key] for key in ("mean", "std", "crop_pct", "crop_mode")}
    return EvaluatedModel(network, [*classes], Preprocessing.of({**options, "size": given["input_size"][1:]}))
