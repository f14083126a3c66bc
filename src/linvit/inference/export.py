"""Exports a trained network as a file for other programs: ONNX, or a program of `torch.export`."""

import copy
import io
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from linvit.errors import UserError
from linvit.finite import relative_error, worst
from linvit.heads.detection.base import Detections
from linvit.heads.detection.detector import Detector
from linvit.heads.detection.masks import paste_masks
from linvit.image_size import image_size
from linvit.inference.description import ModelDescription
from linvit.inference.onnx import in_onnxruntime, to_onnx
from linvit.io.files import write_bytes

Dtype = Literal["float32", "float16"]
TOLERANCE = {"float32": 1e-5, "float16": 2e-2}
"""Maximum relative error of a file against the network in float32; half precision has 11 bits."""
SUFFIXES = (".onnx", ".pt2")
DESCRIPTION = "description.json"  # entry of a `torch.export` file for the metadata of an ONNX file
OUTPUTS = ("num_detections", "boxes", "labels", "scores", "masks")
"""Outputs of a detector's file: (B,), (B, n, 4), (B, n), (B, n) and, with masks, (B, n, 28, 28). Entries after
an image's number of detections are zero. Boxes are x1, y1, x2, y2 in pixels of the input images of the file. Masks are
probabilities of the pixels of each box, which `linvit.heads.detection.masks.paste_masks` pastes into the image."""

RunFile = Callable[[Tensor], Any]  # images to logits, or to a list of a detector's outputs


class Case(NamedTuple):
    """Error of a file against torch on a batch of images, and for a detector the number of detections."""

    batch: int
    size: tuple[int, int]
    error: float
    detections: int = 0


class ExportedNetwork(nn.Module):
    """Network of a file: maps images (pixels with `normalise`, mean and std) to logits or a detector's `OUTPUTS`."""

    def __init__(
        self, network: nn.Module, normalise: tuple[Sequence[float], Sequence[float]] | None, dtype: Dtype = "float32"
    ) -> None:
        super().__init__()
        self.network = network
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.normalise = normalise is not None
        mean, std = normalise or ([0.0], [1.0])
        self.mean, self.std = (nn.Buffer(255 * torch.tensor(each).view(-1, 1, 1)) for each in (mean, std))

    def forward(self, images: Tensor) -> Any:
        """Maps images (B, C, H, W) to logits; a detector, outside an export, to a list of `Detections`."""
        if self.normalise:
            images = (images.float() - self.mean) / self.std
        images = images.to(self.dtype)
        if not isinstance(self.network, Detector):
            return self.network(images).float()
        if not torch.compiler.is_exporting():
            return self.network(list(images))
        found = self.network.detect_batch(images)
        return [found[name] for name in OUTPUTS if name in found]


@dataclass
class Export:
    """Export of a network, in evaluation mode and float32, so that the file computes in `dtype`.

    The file never resizes images: PIL's filters on 8 bits have no counterpart in ONNX.
    """

    network: nn.Module
    description: ModelDescription
    with_preprocessing: bool = False
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        self.is_detector = isinstance(self.network, Detector)
        if self.is_detector and self.dtype != "float32":
            raise UserError("detectors can only be exported in float32 (half precision changes which boxes NMS keeps)")
        known = self.description.preprocessing or {}
        if self.with_preprocessing and "mean" not in known:
            raise UserError("the checkpoint has no normalisation constants: export without --with_preprocessing")
        options = self.description.options
        self.size = image_size(options["img_size"])
        self.channels = int(options.get("in_chans", 3))
        self.pixels = torch.uint8 if self.with_preprocessing and not known.get("value_range") else torch.float32
        normalise = (known["mean"], known["std"]) if self.with_preprocessing else None
        self.wanted = ExportedNetwork(self.network, normalise).eval()
        self.exported = self.wanted
        if self.dtype == "float16":
            self.exported = ExportedNetwork(copy.deepcopy(self.network).half(), normalise, self.dtype).eval()
        self.fixed = self._fixed()
        self.outputs = ["logits"]  # names of the file's outputs
        if isinstance(self.network, Detector):
            self.outputs = list(OUTPUTS if self.network.with_masks else OUTPUTS[:-1])

    @property
    def cases(self) -> list[tuple[int, tuple[int, int]]]:
        """Returns batches and sizes at which a file is compared with torch: the nominal one, and others, not square."""
        if self.fixed:
            return [(batch, self.size) for batch in (1, 5)]
        height, width = self.size
        step = 21 if self.is_detector else math.gcd(height, width, 32)  # detectors pad images to multiples of 32
        return [
            (1, self.size),
            (5, (height + step, width)),
            (1, (height, width + 2 * step)),
            (5, (height + step, width + 2 * step)),
        ]

    def images(self, batch: int, size: tuple[int, int]) -> Tensor:
        """Returns random images (B, C, H, W) of the file's kind."""
        shape = (batch, self.channels, *size)
        generator = torch.Generator().manual_seed(0)
        if self.with_preprocessing:
            return torch.randint(256, shape, generator=generator).to(self.pixels)
        return torch.randn(shape, generator=generator)

    @property
    def metadata(self) -> dict[str, str]:
        """Returns the metadata of a file."""
        known = self.description
        pixels = "0 to 255" if self.with_preprocessing else "normalised: (pixel / 255 - mean) / std"
        return {
            "class_names": json.dumps(known.class_names),
            "images": f"{str(self.pixels).removeprefix('torch.')}, {pixels}",
            "outputs": json.dumps(self.outputs),
            "preprocessing": json.dumps(known.preprocessing),
            "description": json.dumps(asdict(known)),
        }

    def write(self, path: Path) -> RunFile:
        """Writes the file; returns a function that runs it. Raises a `UserError` if torch cannot export the network."""
        traced = (288, 352) if self.is_detector and not self.fixed else self.size  # no map of a pyramid has a side of 1
        example = (self.images(2, traced),)
        dynamic = (dict.fromkeys([0, *([] if self.fixed else [2, 3])], torch.export.Dim.DYNAMIC),)
        try:
            if path.suffix == ".pt2":
                return self._write_program(path, example, dynamic)
            proto = to_onnx(self.exported, example, dynamic, ["images"], self.outputs)
        except UserError:
            raise
        except Exception as error:  # any exception of torch's exporter
            while error.__cause__ is not None:
                error = cast("Exception", error.__cause__)
            if isinstance(error, OSError):  # of the disk
                raise error from None
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UserError(f"torch cannot export this network: {reason}") from error
        for name, value in self.metadata.items():
            proto.metadata_props.add(key=name, value=value)
        content = proto.SerializeToString()
        write_bytes(path, content)
        return run_onnx(content)

    def _write_program(self, path: Path, example: tuple[Tensor, ...], dynamic: Any) -> RunFile:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.export.export(self.exported, example, dynamic_shapes=dynamic)
            for part in program.graph_module.modules():
                for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                    node.meta.pop("stack_trace", None)  # contains folders of this machine
            content = io.BytesIO()
            torch.export.save(program, content, extra_files={DESCRIPTION: json.dumps(self.metadata)})
            content.seek(0)
            run = torch.export.load(content).module()
        write_bytes(path, content.getvalue())
        return cast("RunFile", run)

    @torch.no_grad()
    def compare(self, run: RunFile) -> list[Case]:
        """Returns the largest relative error of a file's logits, or of detections, against torch's in each case."""
        found = []
        for batch, size in self.cases:
            images = self.images(batch, size)
            got, want = run(images), self.wanted(images)
            if self.is_detector:
                errors = [_apart([x[i] for x in got], one, size) for i, one in enumerate(want)]
                found.append(Case(batch, size, worst(errors), sum(len(one["scores"]) for one in want)))
            else:
                found.append(Case(batch, size, relative_error(got, want)))
        return found

    @torch.no_grad()
    def _fixed(self) -> str:
        """Returns the reason why a file is for one size of images only; "" if it is for any size."""
        parts = {type(part).__name__ for part in self.network.modules() if not getattr(part, "exports_any_size", True)}
        if parts:
            return f"{', '.join(sorted(parts))} depends on the size of the map"
        self.fixed = ""
        try:
            for _, size in self.cases[1:]:
                self.wanted(self.images(1, size))
        except Exception as error:  # also of third-party backbones
            return f"the network refuses other sizes: {error}".partition("\n")[0]
        return ""


def _apart(found: Sequence[Tensor], want: Detections, size: tuple[int, int]) -> float:
    """Returns the distance of an image's (H, W) detections to the nearest of the same class: box, score, masks."""
    count = int(found[0])
    if count != len(want["scores"]):
        return math.inf
    if not count:
        return 0.0
    got = dict(zip(OUTPUTS[1:], (x[:count] for x in found[1:]), strict=False))
    a, b = (torch.column_stack([x["boxes"] / max(size), x["labels"], x["scores"]]) for x in (want, got))
    apart = torch.cdist(a, b, p=math.inf)
    nearest, match = apart.min(1)
    errors = [float(nearest.max()), float(apart.amin(0).max())]
    if "masks" in got:
        pasted = paste_masks(got["masks"], got["boxes"], size)[match]
        errors.append(float((pasted != want["masks"]).float().mean()))
    return worst(errors)


def run_onnx(content: bytes) -> RunFile:
    """Returns a function that runs an ONNX file of a network."""
    run = in_onnxruntime(content)

    def outputs(images: Tensor) -> Any:
        found = run(images)
        return found[0] if len(found) == 1 else found

    return outputs
