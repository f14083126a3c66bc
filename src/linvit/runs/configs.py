"""Finds configurations by path or by the name of one that comes with linvit, and reads their bases."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from linvit.errors import UserError, did_you_mean
from linvit.io.plain_text import as_argument
from linvit.registry.model_info import ADE20K, COCO, CONFIGS, mapping, table
from linvit.registry.removed import CONFIGS as REMOVED
from linvit.registry.removed import without_removed
from linvit.runs import yaml_text

DEVICES = 8  # number of devices of the published runs of recipes
EPOCHS: dict[str, dict[str, Any]] = {"3x": {"trainer.max_epochs": 36, "model.decay_epochs": [27, 33]}}
"""Options of a schedule that differ from those of the bases, which train for 12 epochs."""
FIELD = re.compile(r"^# (\w+):\s+(.*)$", re.MULTILINE)


@functools.cache
def names() -> list[str]:
    """Returns the sorted names of the configurations that come with linvit, such as `imagenet/swin_tiny`."""
    files = (path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))
    return sorted([*files, *recipes()])


def shipped(name: str) -> Path | None:
    """Returns the path of a configuration that comes with linvit, also for the row of a table; `.yaml` is optional."""
    name = name.removesuffix(".yaml").removeprefix(f"{CONFIGS.as_posix()}/")
    return CONFIGS / f"{name}.yaml" if name in names() else None


def find(given: str, folder: Path | None = None) -> Path | None:
    """Returns the file at a path, else the configuration of that name that comes with linvit, else None."""
    path = Path(given) if folder is None else folder / given
    return path if path.is_file() else shipped(given)


def text(path: Path) -> str:
    """Returns the text of a configuration that `find` has found."""
    name = path.relative_to(CONFIGS).with_suffix("").as_posix() if path.is_relative_to(CONFIGS) else ""
    return recipes().get(name) or yaml_text.read(path)


def config_file(given: str) -> Path:
    """Returns the file that a path or a name means; raises a `UserError` if there is none."""
    path = find(given)
    if path is None:
        raise UserError(f"configuration '{given}' is neither a name nor an existing file.{near(given)}")
    return path


def near(given: str) -> str:
    """Names the nearest configuration that comes with linvit, and the command that lists all."""
    name = given.removesuffix(".yaml").rpartition("configs/")[2]
    if name in REMOVED:
        return f" It was removed. {REMOVED[name]}."
    return f"{did_you_mean(name, names())} Run linvit list configs for the configurations that come with linvit"


def heading(text: str) -> dict[str, str]:
    """Returns the fields in the opening comment of a configuration, such as `# Paper: ...`; the first line of each."""
    return dict(FIELD.findall(text))


def expand(given: str) -> list[str]:
    """Returns values of `--config` for a configuration: the files under its `base:`, with theirs, then its own file.

    Bases may have bases. Later files override earlier ones, key by key, so a file needs only the keys that differ. A
    base of several files is read once, before the first of them. The row of a table is returned as JSON, and so is a
    file with removed options that had no effect; these options are left out.
    """
    parts: list[str] = []
    for path in chain(config_file(given)):
        content = _content(path)
        kept = without_removed(content, f"'{path}'")
        unchanged = path.is_file() and kept == content
        parts.append(as_argument(path) if unchanged else json.dumps({**kept, "base": None}, default=str))
    return parts


def chain(path: Path, seen: set[Path] | None = None) -> list[Path]:
    """Returns the bases of a file, with theirs, and then itself; each once, at its first place."""
    seen = set() if seen is None else seen
    if (own := path.resolve()) in seen:
        return []
    seen.add(own)
    return [*(file for base in _bases(path) for file in chain(base, seen)), path]


def _content(path: Path) -> dict[str, Any]:
    """Returns the content of a configuration; an empty mapping if it is not a mapping, which the parser reports."""
    try:
        content = yaml_text.load(text(path), f"'{path}'")
    except yaml.YAMLError:
        return {}
    except ValueError as error:  # a number with thousands of digits
        raise UserError(f"'{path}' is not a configuration: {error}") from error
    return content if isinstance(content, dict) else {}


def _bases(path: Path) -> list[Path]:
    """Returns the files under `base:`, given by paths relative to the file, or by names of linvit's configurations."""
    named = _content(path).get("base")
    given = [named] if isinstance(named, str) else named or []
    if not isinstance(given, list) or not all(isinstance(base, str) for base in given):
        raise UserError(f"'base:' of configuration '{path}' must be a file or a list of files; got {named!r}")
    found = {base: find(base, path.parent) for base in given}
    for base, file in found.items():
        if file is None:
            raise UserError(
                f"configuration '{path}' starts from '{path.parent / base}', which does not exist; correct its 'base:'."
                f"{near(base)}"
            )
    return [file for file in found.values() if file is not None]


@functools.cache
def recipes() -> dict[str, str]:
    """Returns the YAML text of each recipe that is a row of a table, by name, such as `coco/swin_tiny_mask_rcnn_1x`.

    A row of `configs/coco.csv` or `ade20k.csv` has the backbone and head, the base, and the options that differ from
    the base. In names, cascaded heads are shortened, so that the names fit a terminal.
    """
    found = {}
    for file in (ADE20K, COCO):
        for row in table(file):
            parts = (row["backbone"], row["head"].removesuffix("_mask_rcnn"), row.get("schedule"))
            name = f"{file.stem}/{'_'.join(filter(None, parts))}"
            found[name] = _recipe(name, row)
    return found


def _recipe(name: str, row: dict[str, str]) -> str:
    batch = int(row["batch"])
    precision = "in mixed precision (--trainer.precision=16-mixed)"
    if row["precision"] == "32":
        precision = "in float32 (--trainer.precision=32-true)"
    images = "one image" if batch == DEVICES else f"{batch // DEVICES} images"
    titles = {"miou": "mIoU", "box_ap": "box AP", "mask_ap": "mask AP"}
    scores = ", ".join(f"{title} {float(row[key])}" for key, title in titles.items() if row.get(key))
    # the paper of a backbone is stated in its recipe for ImageNet
    first = (CONFIGS / "imagenet" / f"{row['backbone']}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    comment = {
        "Paper": first.removeprefix("# Paper:").strip(),
        "Command": f"linvit fit --config {name} --data.source=PATH --model.pretrained=WEIGHTS",
        "Expected": "not yet run" + (f"; published {scores} ({row['source']})" if scores else ""),
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
