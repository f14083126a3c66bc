"""Recipes that are rows of a table: `configs/coco.csv` and `configs/ade20k.csv` as the texts of configurations.

A row says what is a recipe's own: the backbone and head, the base, and what differs from it. What is published of it
stands beside, so that `linvit.model_info` reads the same rows.
"""

import functools
from pathlib import Path
from typing import Any

import yaml

from linvit.model_info import ADE20K, COCO, CONFIGS, mapping, table

DEVICES = 8  # of the published runs
EPOCHS: dict[str, dict[str, Any]] = {"3x": {"trainer.max_epochs": 36, "model.decay_epochs": [27, 33]}}
"""What a schedule changes in the bases, which train for 12 epochs."""


@functools.cache
def recipes() -> dict[str, str]:
    """The YAML text of each recipe by its name, such as `coco/swin_tiny_mask_rcnn_1x`."""
    return {name: _text(name, row) for file in (ADE20K, COCO) for row in table(file) for name in [_name(file, row)]}


def _name(file: Path, row: dict[str, str]) -> str:
    """Backbone, head and schedule; cascaded heads without the rest of their name, which fits a terminal so."""
    parts = [row["backbone"], row["head"].removesuffix("_mask_rcnn"), row.get("schedule", "")]
    if row["head"] == "mask_rcnn":
        parts[1] = row["head"]
    return f"{file.stem}/{'_'.join(filter(None, parts))}"


def _text(name: str, row: dict[str, str]) -> str:
    batch = int(row["batch"])
    precision = "in mixed precision (--trainer.precision=16-mixed)"
    if row["precision"] == "32":
        precision = "in float32 (--trainer.precision=32-true)"
    images = "one image" if batch == DEVICES else f"{batch // DEVICES} images"
    comment = {
        "Paper": _paper(row["backbone"]),
        "Command": f"linvit fit --config {name} --data.source=PATH --model.pretrained=WEIGHTS",
        "Hardware": f"the published total batch is {batch}: {DEVICES} devices with {images} each, {precision}",
        "Note": row["note"],
    }
    backbone: Any = row["backbone"]
    if row["options"]:
        backbone = {"name": backbone, **mapping(row["options"])}
    settings = {
        "model.backbone": backbone,
        "model.drop_path_rate": float(row["drop_path"]),
        "model.published_batch_size": batch,
        "data.batch_size": batch // DEVICES,
        **EPOCHS.get(row.get("schedule", ""), {}),
        **mapping(row["more"]),
    }
    content: dict[str, Any] = {"base": f"base/{name.partition('/')[0]}/{row['base']}"}
    for option, value in settings.items():
        part, _, key = option.partition(".")
        below = content.setdefault(part, {})
        (below if part == "trainer" else below.setdefault("init_args", {}))[key] = value
    lines = [f"# {field + ':':9} {value}" for field, value in comment.items() if value]
    body: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=10**6)
    return "\n".join([*lines, body])


def _paper(backbone: str) -> str:
    """The paper of a backbone: that of its recipe for ImageNet."""
    first = (CONFIGS / "imagenet" / f"{backbone}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# Paper:").strip()
