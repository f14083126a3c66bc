"""`linvit list configs`: the configurations that come with linvit, one of them with its base, or a copy of it."""

import itertools
import shlex
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from linvit import yaml_text
from linvit.files import check_new_file
from linvit.model_info import CONFIGS, ade20k_info, coco_info, model_info
from linvit.runs import configs
from linvit.runs.configs import chain, config_file, heading, names, shipped
from linvit.terminal import table

LONGEST = 40  # characters of what is expected: beside it stand names, in 80 columns


def overview(pattern: str) -> list[str]:
    """A table of the experiments whose names match a wildcard pattern, and one of the parts that experiments share."""
    chosen = [name for name in names() if fnmatchcase(name, pattern)]
    if not chosen:
        return ["configs", f"  none of {len(names())} is like '{pattern}'"]
    texts = {name: configs.text(config_file(name)) for name in chosen}
    fields = {name: found for name in chosen if "Paper" in (found := heading(texts[name]))}
    rows = [(f"  {name}", _short(_expected(name, found)), found["Paper"]) for name, found in fields.items()]
    lines = table([("configs", "expected", "paper"), *rows]) if rows else []
    parts = [(f"  {name}", _sentence(texts[name])) for name in chosen if name not in fields]
    titles = ("parts, for base: or a second --config", "")
    return lines + [""] * bool(lines and parts) + (table([titles, *parts]) if parts else [])


def one(name: str, output: Path | None) -> str:
    """A configuration with all that its bases say; with `output` its text is written there.

    Where there are bases, a comment behind each value says which file it is from, if not from the configuration itself.
    """
    path = shipped(name) or config_file(name)
    text = configs.text(path)
    lines = list(_with_expected(path, text))
    if output is None and len(files := chain(path)) > 1:
        lines = [*itertools.takewhile(lambda line: line.startswith("#"), lines), *_lines(_merged(files), path)]
    if output is None:
        return "\n".join(lines)
    check_new_file(output)
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    verb = "compare" if "linvit compare" in heading(text).get("Command", "") else "fit --config"
    return f"wrote {output}: change it, then train with\n  linvit {verb} {shlex.quote(str(output))}"


class _Value(NamedTuple):
    """What a file says of one option."""

    value: Any
    file: Path


def _merged(files: list[Path]) -> dict[str, Any]:
    """What some files say together, the last wins, key by key; a mapping with a name, as of a backbone, as a whole."""
    tree: dict[str, Any] = {}
    for file in files:
        content = yaml_text.load(configs.text(file), f"'{file}'") or {}
        _add({key: value for key, value in content.items() if key != "base"}, tree, file)
    return tree


def _add(content: Mapping[str, Any], tree: dict[str, Any], file: Path) -> None:
    for key, value in content.items():
        if isinstance(value, dict) and "name" not in value:
            below = tree.get(key)
            tree[key] = below if isinstance(below, dict) else {}
            _add(value, tree[key], file)
        else:
            tree[key] = _Value(value, file)


def _lines(tree: Mapping[str, Any], own: Path, indent: str = "") -> Iterator[str]:
    """The tree as YAML. The comments are names of linvit's configurations, or paths."""
    for key, node in tree.items():
        if isinstance(node, _Value):
            text = yaml.safe_dump(node.value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
            inside = node.file.is_relative_to(CONFIGS)
            name = node.file.relative_to(CONFIGS).with_suffix("").as_posix() if inside else str(node.file)
            yield f"{indent}{key}: {text}" + (f"  # {name}" if node.file != own else "")
        else:
            yield f"{indent}{key}:"
            yield from _lines(node, own, indent + "  ")


def _with_expected(path: Path, text: str) -> Iterator[str]:
    """The lines of a configuration, with what our tables publish of its model behind the command."""
    own = path.is_relative_to(CONFIGS) and "Expected" not in heading(text)
    for line in text.splitlines():
        yield line
        if own and line.startswith("# Command:"):
            yield f"# Expected: {_expected(path.relative_to(CONFIGS).with_suffix('').as_posix(), heading(text))}"


def _expected(name: str, fields: Mapping[str, str]) -> str:
    """What the opening comment of a configuration expects, or what is published of a recipe's model in our tables."""
    if "Expected" in fields:
        return fields["Expected"]
    set_, _, recipe = name.partition("/")
    if set_ == "imagenet" and recipe in model_info():
        facts = model_info()[recipe]
        said = f"published top-1 {facts.top1} ({facts.top1_source})" if facts.top1 else "no top-1 is published"
        return f"not yet run; {said}"
    for (backbone, head), miou in ade20k_info().items():
        if miou.miou and name == f"ade20k/{backbone}_{head}":
            return f"not yet run; published mIoU {miou.miou} ({miou.source})"
    for (backbone, head, schedule), ap in coco_info().items():
        if ap.box_ap and name == f"coco/{backbone}_{head}_{schedule}".replace("cascade_mask_rcnn", "cascade"):
            masks = "" if ap.mask_ap is None else f", mask AP {ap.mask_ap}"
            return f"not yet run; published box AP {ap.box_ap}{masks} ({ap.source})"
    return "not yet run"


def _short(text: str) -> str:
    """What is expected of an experiment, without what stands in parentheses; if that is long, its first part."""
    text = text.partition(" (")[0]
    return text if len(text) <= LONGEST else text.partition(";")[0]


def _sentence(text: str) -> str:
    """The first sentence of the opening comment."""
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    return comment.partition(". ")[0].rstrip(".")
