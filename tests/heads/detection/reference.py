"""mmdetection's settings and metadata, as in the golden files, in linvit's terms."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linvit.heads.detection.assign import Assigner
from linvit.heads.detection.base import ImageShape
from tests.golden_files import FOLDER, Golden, load


def of_network(case: str, kind: str) -> Any:
    """Parametrises a test over `golden`: the files of this case about a detector of this type."""
    files = [load(path.stem) for path in sorted(FOLDER.glob("dense_det_full_*.safetensors"))]
    chosen = [g for g in files if g.meta["case"] == case and g.constructor["model"]["type"] == kind]
    assert chosen
    return pytest.mark.parametrize("golden", chosen, ids=lambda golden: golden.name)


def evenly(candidates: Tensor, count: int) -> Tensor:
    """The sampling of the golden files: candidates floor(j n / k)."""
    return candidates[torch.arange(count) * len(candidates) // count] if len(candidates) > count else candidates


def shapes(golden: Golden) -> list[ImageShape]:
    metas = golden.kwargs["image_metas"]
    return [ImageShape(*(tuple(meta[name]) for name in ("img_shape", "pad_shape", "ori_shape"))) for meta in metas]


def unscaled(images: Sequence[ImageShape]) -> list[ImageShape]:
    return [image._replace(original=image.size) for image in images]


def levels(inputs: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    names = sorted(name for name in inputs if name.startswith(prefix) and name[len(prefix) :].isdigit())
    return [inputs[name] for name in names]


def truth(inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Targets of all images."""
    found = []
    for i in range(len(levels(inputs, "gt_boxes"))):
        target = {"boxes": inputs[f"gt_boxes{i}"].detach()}
        target["labels"] = inputs.get(f"gt_labels{i}", torch.zeros(len(target["boxes"]), dtype=torch.long))
        if f"gt_masks{i}" in inputs:
            target["masks"] = inputs[f"gt_masks{i}"]
        found.append(target)
    return found


def assigner(given: Mapping[str, Any]) -> Assigner:
    low = given.get("match_low_quality", True)
    return Assigner(given["pos_iou_thr"], given["neg_iou_thr"], low, given["min_pos_iou"])


def detections(found: Sequence[Mapping[str, Tensor]], infix: str = "") -> dict[str, Tensor]:
    """Detections under the names of the golden files."""
    outputs = {}
    for i, of_image in enumerate(found):
        outputs[f"detections{infix}{i}"] = torch.cat([of_image["boxes"], of_image["scores"][:, None]], 1)
        outputs[f"labels{infix}{i}"] = of_image["labels"]
        if "masks" in of_image:
            outputs[f"masks{infix}{i}"] = of_image["masks"]
    return outputs


def check_detections(golden: Golden, outputs: Mapping[str, Tensor]) -> None:
    """Integers are equal, and of the pixels of masks at most one in a thousand is another."""
    assert set(outputs) == set(golden.meta["outputs"])
    for name, output in outputs.items():
        stored = golden.tensors[f"output.{name}"]
        if "masks" in name:
            assert output.shape == stored.shape
            assert (output != stored.bool()).double().mean() <= 1e-3
        elif output.is_floating_point():
            golden.check(f"output.{name}", output)
        else:
            assert torch.equal(output, stored)


class ToyPyramid(nn.Module):
    """The backbone of the whole detectors: convolutions without overlap, each with tanh."""

    def __init__(self, widths: Sequence[int] = (5, 6, 7, 8)) -> None:
        super().__init__()
        sides = (4, 2, 2, 2)
        ins = (3, *widths[:-1])
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, k) for i, o, k in zip(ins, widths, sides, strict=True))
        self.feature_info = [{"num_chs": width, "reduction": 4 * 2**i} for i, width in enumerate(widths)]

    def forward_intermediates(self, x: Tensor, indices: Sequence[int], **_: Any) -> list[Tensor]:
        maps = []
        for conv in self.convs:
            x = conv(x).tanh()
            maps.append(x)
        return [maps[i] for i in indices]
