"""Published facts of linvit's models: of backbones in `models.csv`, of dense recipes in `configs/`."""

import csv
import functools
from pathlib import Path
from typing import Any, NamedTuple

import yaml

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parents[1] / "configs"
"""Configurations that come with linvit: in the package in a wheel, beside `src` in a checkout."""

MODELS, ADE20K, COCO = PACKAGE / "backbones" / "models.csv", CONFIGS / "ade20k.csv", CONFIGS / "coco.csv"


class ModelInfo(NamedTuple):
    """Published facts of one backbone with 1000 classes."""

    img_size: int  # of the numbers below
    parameters: int
    macs: int  # multiply-accumulates of convolutions, linear layers and matrix products on one image
    top1: float | None  # published accuracy on ImageNet-1K in per cent; not measured by linvit
    top1_source: str  # repository: file, or paper
    crop_pct: float  # side of the evaluated crop over the side that the image is resized to
    crop_mode: str  # as in timm: "center" keeps the aspect ratio, "squash" makes a square
    also: dict[str, Any]  # options of a second model that may have the accuracy, if the authors are not clear


class DenseInfo(NamedTuple):
    """Published scores of a segmentor on ADE20K or a detector on COCO val2017, at one scale, no mirrored images."""

    scores: dict[str, float]  # "mIoU", or "box_AP" and "mask_AP", in [0, 1]; empty if none is published
    source: str
    options: dict[str, Any]  # of the backbone that has the scores, where they differ from its defaults


@functools.cache
def model_info() -> dict[str, ModelInfo]:
    """Returns the rows of the table by the name of the backbone."""
    return {
        row["name"]: ModelInfo(
            img_size=int(row["img_size"]),
            parameters=int(row["parameters"]),
            macs=int(row["macs"]),
            top1=float(row["top1"]) if row["top1"] else None,
            top1_source=row["top1_source"],
            crop_pct=float(row["crop_pct"]),
            crop_mode=row["crop_mode"],
            also=mapping(row["also"]),
        )
        for row in table(MODELS)
    }


@functools.cache
def dense_info() -> dict[tuple[str, str, str], DenseInfo]:
    """Returns rows of `configs/` by backbone, head, schedule: "1x" or "3x" on COCO (12 or 36 epochs), "" on ADE20K."""
    names = {"miou": "mIoU", "box_ap": "box_AP", "mask_ap": "mask_AP"}
    return {
        (row["backbone"], row["head"], row.get("schedule", "")): DenseInfo(
            {name: float(row[column]) / 100 for column, name in names.items() if row.get(column)},
            row["source"],
            mapping(row["options"]),
        )
        for row in (*table(ADE20K), *table(COCO))
    }


def mapping(text: str) -> dict[str, Any]:
    """Returns the mapping in a cell of a table, as YAML; {} for an empty cell."""
    return yaml.safe_load(text) or {}


def table(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a file of comma-separated values, by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
