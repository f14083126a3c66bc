"""What is published of linvit's models: of backbones in `models.csv`, of dense recipes in `configs/`."""

import csv
import functools
from pathlib import Path
from typing import Any, NamedTuple

import yaml

PACKAGE = Path(__file__).resolve().parent
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parents[1] / "configs"
"""The configurations that come with linvit: a wheel has them in the package, a checkout beside `src`."""

MODELS, ADE20K, COCO = PACKAGE / "backbones" / "models.csv", CONFIGS / "ade20k.csv", CONFIGS / "coco.csv"


class ModelInfo(NamedTuple):
    """One backbone as its authors published it, 1000 classes."""

    img_size: int  # that the numbers hold for
    parameters: int
    macs: int  # multiply-accumulates of convolutions, linear layers and matrix products on one image
    top1: float | None  # published accuracy on ImageNet-1K in per cent; nothing that linvit measured
    top1_source: str  # repository: file, or paper
    crop_pct: float  # side of the evaluated crop over the side that the image is resized to
    crop_mode: str  # timm's word: "center" keeps the aspect, "squash" makes a square
    also: dict[str, Any]  # options of a second model that the accuracy may be of, if the authors contradict each other


class Ade20kInfo(NamedTuple):
    """What was published of a segmentor on ADE20K: one scale, not mirrored, crops of 512x512 in training."""

    miou: float | None  # per cent; none if none is published
    source: str
    options: dict[str, Any]  # of the backbone that the score is of, where they are not its defaults


class CocoInfo(NamedTuple):
    """What was published of a detector on COCO val2017, one scale."""

    box_ap: float | None  # per cent; none if none is published
    mask_ap: float | None  # none if the head has no masks
    source: str
    options: dict[str, Any]


@functools.cache
def model_info() -> dict[str, ModelInfo]:
    """Returns the rows of the table by the name of the backbone."""
    return {
        row["name"]: ModelInfo(
            img_size=int(row["img_size"]),
            parameters=int(row["parameters"]),
            macs=int(row["macs"]),
            top1=_number(row["top1"]),
            top1_source=row["top1_source"],
            crop_pct=float(row["crop_pct"]),
            crop_mode=row["crop_mode"],
            also=mapping(row["also"]),
        )
        for row in table(MODELS)
    }


@functools.cache
def ade20k_info() -> dict[tuple[str, str], Ade20kInfo]:
    """What was published of segmentors, by the names of backbone and head. Nothing that linvit measured."""
    return {
        (row["backbone"], row["head"]): Ade20kInfo(_number(row["miou"]), row["source"], mapping(row["options"]))
        for row in table(ADE20K)
    }


@functools.cache
def coco_info() -> dict[tuple[str, str, str], CocoInfo]:
    """What was published of detectors, by the names of backbone, head and schedule, "1x" or "3x" (12 or 36 epochs)."""
    return {
        (row["backbone"], row["head"], row["schedule"]): CocoInfo(
            box_ap=_number(row["box_ap"]),
            mask_ap=_number(row["mask_ap"]),
            source=row["source"],
            options=mapping(row["options"]),
        )
        for row in table(COCO)
    }


def _number(text: str) -> float | None:
    return float(text) if text else None


def mapping(text: str) -> dict[str, Any]:
    """The mapping in a cell of a table, as YAML; an empty cell is an empty one."""
    return yaml.safe_load(text) or {}


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a file of comma-separated values, by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
