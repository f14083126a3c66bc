"""Annotations of objects that are not read: their format, and how to use them."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from linvit.data.sources.coco import find_coco
from linvit.data.sources.folder import HIDDEN, walk
from linvit.reading import read_regular, read_start

START = 4096  # bytes of a text that are looked at
LOOKED_AT = {".json": 20, ".xml": 3, ".txt": 8, ".csv": 8}
"""Endings of files of annotations, and how many files with each are looked at in a folder."""
FRACTION, NUMBER = r"(?:[01]|[01]?\.\d+(?:e-?\d+)?|1\.0*|\de-\d+)", r"-?\d+(?:\.\d+)?"
WORD = re.compile(r"(train(?:ing)?|val(?:id(?:ation)?)?|dev|test(?:ing)?)(\d{4})?(?![a-z])", re.IGNORECASE)
COCO = "COCO"


def _keys(entry: Any) -> set[str]:
    return {*entry} if isinstance(entry, dict) else set()


def _first(entries: Any) -> set[str]:
    return _keys(next(iter(entries), None)) if isinstance(entries, list) else set()


def _starts(pattern: str) -> Callable[[Any], Any]:
    return re.compile(pattern, re.DOTALL).match


FORMATS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "COCO's panoptic segmentation": (
        ".json",
        lambda content: "segments_info" in _first(content.get("annotations") if isinstance(content, dict) else None),
    ),
    COCO: (".json", lambda content: {"images", "annotations", "categories"} <= _keys(content)),
    "LabelMe": (".json", lambda content: {"shapes", "imagePath"} <= _keys(content)),
    "VGG Image Annotator": (
        ".json",
        lambda content: (
            "_via_img_metadata" in _keys(content)
            or (_keys(content) and all({"filename", "regions"} <= _keys(one) for one in content.values()))
        ),
    ),
    "BDD100K": (".json", lambda content: {"name", "labels"} <= _first(content)),
    "Supervisely": (".json", lambda content: {"size", "objects"} <= _keys(content)),
    "CreateML": (".json", lambda content: {"image", "annotations"} <= _first(content)),
    "Label Studio JSON": (
        ".json",
        lambda content: (
            {"data", "annotations"} <= _first(content) or {"image", "label", "annotation_id"} <= _first(content)
        ),
    ),
    "Pascal VOC": (".xml", _starts(r"[^<]*(?:<[?!].*?>\s*)*<annotation[\s>]")),
    "CVAT for images": (".xml", _starts(r"[^<]*(?:<[?!].*?>\s*)*<annotations[\s>]")),
    "YOLO": (".txt", _starts(rf"\s*\d+(?:[ \t]+{FRACTION}){{4,}}[ \t]*(?:\r?\n|$)")),
    "DOTA": (".txt", _starts(rf"(?:\w+:\S*\s+)*(?:{NUMBER}[ \t]+){{8}}\S+[ \t]+\d[ \t]*(?:\r?\n|$)")),
    "KITTI": (".txt", _starts(rf"[A-Za-z]\w+(?:[ \t]+{NUMBER}){{14,15}}[ \t]*(?:\r?\n|$)")),
    "WIDER FACE": (".txt", _starts(r"\S+\.[A-Za-z]+\s+\d+\s+(?:\d+ ){4,}")),
    "MOT or VisDrone": (".txt", _starts(rf"\d+,{NUMBER}(?:,{NUMBER}){{5,8}}\s*(?:\r?\n|$)")),
    "CSV": (".csv", _starts(r'(?i)[^\n]*(?:^|[,;\t"])(?:bbox|x_?min|x1)(?:["\r\n,;\t]|$)')),
}
"""Ending of the files of a format, and whether their content, JSON's value or the start of a text, is of it."""


def holds_coco(path: Path) -> bool:
    """True if a file in a folder has the name and the content of COCO's annotations."""
    return COCO in map(_format_of, find_coco(path).values())


def other_annotations(path: Path) -> str:
    """Says which annotations in a folder are not read, and what to do; "" if none are found."""
    lower = [folder for folder in sorted(path.glob("*")) if folder.is_dir() and not folder.name.startswith(HIDDEN)]
    if within := next((folder for folder in lower if holds_coco(folder)), None):
        return f"those of COCO lie one folder below. Give '{within}'"
    first = ""
    for file in _files(path):
        kind = _format_of(file)
        if kind == COCO:
            split = WORD.search(file.stem) or (WORD.search(file.parent.name) if file.parent != path else None)
            alone = "instances_default" if file.stem.endswith("default") else "annotations"
            whole = alone if split is None or split.string != file.stem else split[0].lower()
            return f"'{file}' is COCO's, but its name says no split. Call it '{file.with_name(f'{whole}.json')}'"
        first = first or (f"'{file}' has the format {kind}" if kind else "")
    way = "Convert the annotations to COCO's JSON of instances, which Roboflow, CVAT and Label Studio export"
    return f"{first}. {way}" if first else ""


def _files(path: Path) -> Iterator[Path]:
    """The first files of each folder that may hold annotations."""
    for folder, names in sorted(walk(path).items()):
        for ending, most in LOOKED_AT.items():
            own = (name for name in sorted(names) if name.lower().endswith(ending))
            yield from (Path(folder, name) for name in islice(own, most))


def _format_of(file: Path) -> str | None:
    """The format of a file of annotations; None if it is no such file."""
    own = {kind: is_of for kind, (ending, is_of) in FORMATS.items() if ending == file.suffix.lower()}
    try:
        if file.suffix.lower() == ".json":
            content = json.loads(read_regular(file))
        else:
            content = read_start(file, START).decode(errors="replace").removeprefix("\ufeff")
    except (OSError, ValueError, RecursionError):
        return None
    return next((kind for kind, is_of in own.items() if is_of(content)), None)
