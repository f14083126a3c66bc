"""Annotations of objects that are not read: their format, and how to use them."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from linvit.data.sources.coco import find_coco
from linvit.data.sources.folder import ALIASES, folders_in, walk
from linvit.io.reading import read_regular, read_start

START = 4096  # bytes of a text that are looked at
LOOKED_AT = {".json": 20, ".xml": 3, ".txt": 8, ".csv": 8}
"""Endings of files of annotations, and how many files with each are looked at in a folder."""
WORD = re.compile(rf"({'|'.join(ALIASES)})(\d{{4}})?(?![a-z])", re.IGNORECASE)
COCO = "COCO"
JSON_FORMATS = (
    ("COCO's panoptic segmentation", "annotations", {"segments_info"}),
    (COCO, "file", {"images", "annotations", "categories"}),
    ("LabelMe", "file", {"shapes", "imagePath"}),
    ("Supervisely", "file", {"size", "objects"}),
    ("VGG Image Annotator", "file", {"_via_img_metadata"}),
    ("VGG Image Annotator", "entries", {"filename", "regions"}),
    ("BDD100K", "entries", {"name", "labels"}),
    ("CreateML", "entries", {"image", "annotations"}),
    ("Label Studio JSON", "entries", {"data", "annotations"}),
    ("Label Studio JSON", "entries", {"image", "label", "annotation_id"}),
)
"""Keys of a format: of the file, or of the first of its entries or annotations."""
FRACTION, NUMBER = r"(?:[01]|[01]?\.\d+(?:e-?\d+)?|1\.0*|\de-\d+)", r"-?\d+(?:\.\d+)?"
XML = r"[^<]*(?:(?><!--.*?-->|<[?!][^>]*>)[^<]*)*+"  # up to the first element, without backtracking
TEXT_FORMATS = {
    "Pascal VOC": (".xml", rf"{XML}<annotation[\s>]"),
    "CVAT for images": (".xml", rf"{XML}<annotations[\s>]"),
    "YOLO": (".txt", rf"\s*\d+(?:[ \t]+{FRACTION}){{4,}}[ \t]*(?:\r?\n|$)"),
    "DOTA": (".txt", rf"(?:\w+:\S*\s+)*(?:{NUMBER}[ \t]+){{8}}\S+[ \t]+\d[ \t]*(?:\r?\n|$)"),
    "KITTI": (".txt", rf"[A-Za-z]\w+(?:[ \t]+{NUMBER}){{14,15}}[ \t]*(?:\r?\n|$)"),
    "WIDER FACE": (".txt", r"\S+\.[A-Za-z]+\s+\d+\s+(?:\d+ ){4,}"),
    "MOT or VisDrone": (".txt", rf"\d+,{NUMBER}(?:,{NUMBER}){{5,8}}\s*(?:\r?\n|$)"),
    "CSV": (".csv", r'(?i)[^\n]*(?:^|[,;\t"])(?:bbox|x_?min|x1)(?:["\r\n,;\t]|$)'),
}
"""Ending of the files of a format, and a pattern of their first lines."""


def holds_coco(path: Path) -> bool:
    """True if a file in a folder has the name and the content of COCO's annotations."""
    return COCO in map(_format_of, find_coco(path).values())


def other_annotations(path: Path) -> str:
    """Says which annotations in a folder are not read, and what to do; "" if none are found."""
    tree = walk(path)
    if within := next((name for name in folders_in(tree, next(iter(tree))) if holds_coco(path / name)), None):
        return f"COCO's files are one folder below. Give '{path / within}'"
    first = ""
    for file in _files(tree):
        kind = _format_of(file)
        if kind == COCO:
            split = WORD.search(file.stem) or (WORD.search(file.parent.name) if file.parent != path else None)
            alone = "instances_default" if file.stem.endswith("default") else "annotations"
            whole = alone if split is None or split.string != file.stem else split[0].lower()
            return f"'{file}' is COCO's, but linvit does not know its name. Call it '{file.with_name(f'{whole}.json')}'"
        first = first or (f"'{file}' has the format {kind}" if kind else "")
    way = "Convert the annotations to COCO's JSON of instances, which Roboflow, CVAT and Label Studio export"
    return f"{first}. {way}" if first else ""


def _files(tree: Mapping[str, list[str]]) -> Iterator[Path]:
    """Yields the first files of each folder that may contain annotations."""
    for folder, names in sorted(tree.items()):
        for ending, most in LOOKED_AT.items():
            own = sorted(name for name in names if name.lower().endswith(ending))
            yield from (Path(folder, name) for name in own[:most])


def _format_of(file: Path) -> str | None:
    """Returns the format of a file of annotations; None for other files."""
    ending = file.suffix.lower()
    try:
        if ending == ".json":
            return _json_format(json.loads(read_regular(file)))
        text = read_start(file, START).decode(errors="replace").removeprefix("\ufeff")
    except (OSError, ValueError, RecursionError):
        return None
    kinds = (kind for kind, (own, start) in TEXT_FORMATS.items() if own == ending and re.match(start, text, re.DOTALL))
    return next(kinds, None)


def _json_format(content: Any) -> str | None:
    """Returns the format of a value of JSON; None if it is of none."""
    annotations = content.get("annotations") if isinstance(content, dict) else None
    places = {"file": content, "entries": _first(content), "annotations": _first(annotations)}
    keys = {place: value.keys() for place, value in places.items() if isinstance(value, dict)}
    return next((kind for kind, place, wanted in JSON_FORMATS if wanted <= keys.get(place, set())), None)


def _first(entries: Any) -> Any:
    values = entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ()
    return next(iter(values), None)
