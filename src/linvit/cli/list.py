"""`linvit list`: names for configurations with their owners, and the configurations that come with linvit."""

import inspect
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from linvit.errors import UserError, check_choice
from linvit.io.files import check_new_file, write_text
from linvit.io.terminal import argument_parser, reflow, table
from linvit.registry import attentions, backbones, heads
from linvit.registry.entries import Entry
from linvit.registry.layouts import LAYOUTS, block_kinds
from linvit.registry.model_info import CONFIGS, model_info
from linvit.registry.signatures import descriptions, parameters_of
from linvit.runs import configs, yaml_text
from linvit.runs.configs import chain, config_file, heading, names, shipped

REGISTRIES = {"attentions": attentions, "backbones": backbones, "heads": heads}
EXAMPLE = "{layout: jetvit, linear: focused, window: 14, full: [7, 10]}"
LONGEST = 33  # maximum width of the expected score, beside names in 80 columns
KINDS = [*REGISTRIES, "configs"]
COLUMNS = {
    "attentions": ("cost", "paper"),
    "backbones": ("params (M)", "MACs (G)", "published top-1 (%)"),
    "heads": ("paper",),
}
EPILOG = """examples:
  linvit list                                 all attentions, backbones, heads
  linvit list attentions --filter "*linear*"  names that match a wildcard
  linvit list attentions --layouts            full, window or linear by block
  linvit list attentions focused              formula, paper, cost and options
  linvit list backbones --filter "flatten_*"  sizes and published accuracy
  linvit list backbones flatten_swin_tiny     one of them, with its options
  linvit list configs                         configurations for --config
  linvit list configs quickstart              print one
  linvit list configs images -o mine.yaml     a copy of one, for you to change
"""


def main(argv: list[str]) -> int:
    """Runs `linvit list`; returns 0."""
    parser = argument_parser("linvit list", __doc__, EPILOG)
    parser.add_argument("kind", nargs="?", help=f"one of {', '.join(KINDS)}; default: all but configs")
    parser.add_argument("name", nargs="?", help="show the documentation and options of a name")
    parser.add_argument("--filter", default="*", metavar="PATTERN", help='only names like "*linear*"')
    parser.add_argument("--layouts", action="store_true", help="for attentions: the named layouts of blocks")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the named configuration to FILE")
    args = parser.parse_intermixed_args(argv)  # linvit list configs --output mine.yaml quickstart
    if args.kind is not None:
        check_choice("kind", args.kind, KINDS)
    if args.output is not None and (args.kind != "configs" or args.name is None):
        raise UserError("--output is for one configuration. Write linvit list configs NAME --output FILE")
    if args.name is not None and args.filter != "*":
        raise UserError(f"--filter is for lists, not for the one name '{args.name}'. Remove one of them")
    if args.layouts and (args.kind != "attentions" or args.name is not None):
        raise UserError("--layouts is for attentions. Write linvit list attentions --layouts")
    if args.layouts:
        print("\n".join(_layouts(args.filter)))
    elif args.kind == "configs":
        print("\n".join(_configurations(args.filter)) if args.name is None else _configuration(args.name, args.output))
    elif args.name is not None:
        print("\n".join(_one(args.kind, args.name)))
    else:
        kinds = REGISTRIES if args.kind is None else [args.kind]
        print("\n\n".join("\n".join(_section(kind, args.filter)) for kind in kinds))
    return 0


def _section(kind: str, pattern: str) -> list[str]:
    """Returns a table with one row per name: name, owner if not linvit, facts, summary."""
    registry = REGISTRIES[kind]
    entries = registry.entries()
    rows = [
        (
            f"  {name}",
            " / ".join(entry.owner for entry in entries[name]),
            *_facts(kind, name, entries[name]),
        )
        for name in registry.names(pattern)
    ]
    if not rows:
        return [kind, f"  no name of {len(entries)} matches '{pattern}'"]
    titles = (kind, "owner", *COLUMNS[kind], "summary")
    if all(owner == "linvit" for _, owner, *_ in rows):
        return table([(row[0], *row[2:]) for row in [titles, *rows]])
    return table([titles, *rows])


def _facts(kind: str, name: str, owners: list[Entry]) -> tuple[str, ...]:
    """Returns the columns of a name and its summary, or its error: two owners, or a failed import."""
    blank = ("",) * len(COLUMNS[kind])
    if len(owners) > 1:
        return *blank, "conflict: " + " and ".join(f"{entry.owner} ({entry.target})" for entry in owners)
    try:
        said = REGISTRIES[kind].describe(name)
    except UserError as error:
        reason = f"{type(cause).__name__}: {cause}" if (cause := error.__cause__) else str(error)
        return *blank, f"broken: {reason.partition(chr(10))[0]}"
    if kind == "attentions":
        return said.complexity, said.paper, said.summary
    if kind == "heads":
        return said.paper, said.summary
    facts = model_info().get(name) if owners[0].owner == "linvit" else None
    if facts is None:
        return *blank, said.summary
    top1 = "" if facts.top1 is None else f"{facts.top1:.1f}"
    return f"{facts.parameters / 1e6:.1f}", f"{facts.macs / 1e9:.2f}", top1, said.summary


def _layouts(pattern: str) -> list[str]:
    """Returns a table with one row per layout: blocks of networks of 12 and 24, options, summary; and an example."""
    rows: list[tuple[str, ...]] = [("layouts", "12 blocks", "24 blocks", "options", "summary")]
    for name, layout in LAYOUTS.items():
        if fnmatchcase(name, pattern):
            blocks = ("".join(kind[0].upper() for kind in block_kinds(name, depth)) for depth in (12, 24))
            rows.append((f"  {name}", *blocks, ", ".join(layout.takes), layout.summary))
    if len(rows) == 1:
        return [f"layouts: no name of {len(LAYOUTS)} matches '{pattern}'"]
    return [*table(rows), "", "F: full softmax, W: softmax in windows, L: linear", f"--model.attention='{EXAMPLE}'"]


def _one(kind: str, name: str) -> Iterator[str]:
    registry = REGISTRIES[kind]
    constructor = registry.get(name)
    parameters, inherited = parameters_of(constructor), descriptions(constructor)
    entries = registry.entries().get(name, [Entry(name, name, "a class path")])
    yield f"{name} ({registry.kind})"
    yield f"  from {entries[0].target}, {entries[0].owner}"
    if kind == "backbones" and entries[0].owner == "linvit":
        yield from _published(name)
    yield ""
    text = registry.describe(name).documentation or "(no documentation)"
    yield reflow(text)
    yield ""
    options = {key: value for key, value in parameters.items() if key not in registry.supplied}
    yield "options:" if options else "options: none"
    for option, default in options.items():
        yield reflow(f"  {option} (required)" if default is inspect.Parameter.empty else f"  {option} = {default!r}")
        if option in inherited and f" {option}: " not in text:
            yield reflow(f"      {inherited[option]}")


def _published(name: str) -> Iterator[str]:
    facts = model_info().get(name)
    if facts is None:
        return
    yield f"  {facts.parameters:,} parameters with 1000 classes"
    yield f"  {facts.macs / 1e9:.3f} G multiply-accumulates at {facts.img_size}x{facts.img_size}"
    if facts.top1 is not None:
        yield f"  published top-1 on ImageNet-1K: {facts.top1} %,"
        yield reflow(f"  {facts.top1_source}")


def _configurations(pattern: str) -> list[str]:
    """Returns a table of the experiments that match a wildcard pattern, and one of the parts that experiments share."""
    chosen = [name for name in names() if fnmatchcase(name, pattern)]
    if not chosen:
        return ["configs", f"  no name of {len(names())} matches '{pattern}'"]
    texts = {name: configs.text(config_file(name)) for name in chosen}
    fields = {name: found for name in chosen if "Paper" in (found := heading(texts[name]))}
    rows = []
    for name, found in fields.items():
        expected = expected_of(name, found).partition(" (")[0].replace("box AP", "AP")
        short = expected if len(expected) <= LONGEST else re.split("; |, | of ", expected)[0]
        rows.append((f"  {name}", short, found["Paper"]))
    lines = table([("configs", "expected", "paper"), *rows]) if rows else []
    parts = []
    for name in chosen:
        comment = " ".join(line.removeprefix("# ") for line in texts[name].splitlines() if line.startswith("#"))
        parts += [(f"  {name}", comment.partition(". ")[0].rstrip("."))] * (name not in fields)
    titles = ("parts, for base: or a second --config", "")
    return lines + [""] * bool(lines and parts) + (table([titles, *parts]) if parts else [])


def _configuration(name: str, output: Path | None) -> str:
    """Returns a configuration merged with its bases, each value with its file; writes its own text to `output`."""
    path = shipped(name) or config_file(name)
    text = configs.text(path)
    lines = list(_with_expected(path, text))
    if output is None and len(files := chain(path)) > 1:
        tree: dict[str, Any] = {}
        for file in files:
            _add(yaml_text.load(configs.text(file), f"'{file}'") or {}, tree, file)
        lines = [*itertools.takewhile(lambda line: line.startswith("#"), lines), *_lines(tree, path)]
    if output is None:
        return "\n".join(lines)
    check_new_file(output)
    write_text(output, "\n".join(lines) + "\n")
    verb = "compare" if "linvit compare" in heading(text).get("Command", "") else "fit --config"
    return f"wrote {output}: change it, then train with\n  linvit {verb} {shlex.quote(output.as_posix())}"


def _add(content: Mapping[str, Any], tree: dict[str, Any], file: Path) -> None:
    """Merges the content of a file key by key, with the file; a mapping with a name, such as a backbone, as a whole."""
    for key, value in content.items():
        if isinstance(value, dict) and "name" not in value:
            below = tree.get(key)
            tree[key] = below if isinstance(below, dict) else {}
            _add(value, tree[key], file)
        elif key != "base":
            tree[key] = value, file


def _lines(tree: Mapping[str, Any], own: Path, indent: str = "") -> Iterator[str]:
    """Yields the tree as YAML. The comments are names of linvit's configurations, or paths."""
    for key, node in tree.items():
        if isinstance(node, dict):
            yield f"{indent}{key}:"
            yield from _lines(node, own, indent + "  ")
            continue
        value, file = node
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
        yield f"{indent}{key}: {text}" + (f"  # {_name(file)}" if file != own else "")


def _name(file: Path) -> str:
    return file.relative_to(CONFIGS).with_suffix("").as_posix() if file.is_relative_to(CONFIGS) else str(file)


def _with_expected(path: Path, text: str) -> Iterator[str]:
    """Yields the lines of a configuration, with the published scores of its model after the command."""
    own = path.is_relative_to(CONFIGS) and "Expected" not in heading(text)
    for line in text.splitlines():
        yield line
        if own and line.startswith("# Command:"):
            yield f"# Expected: {expected_of(_name(path), heading(text))}"


def expected_of(name: str, fields: Mapping[str, str]) -> str:
    """Returns the expected result in the opening comment of a configuration, or the published score of its model."""
    if "Expected" in fields:
        return fields["Expected"]
    set_, _, recipe = name.partition("/")
    if set_ == "imagenet" and recipe in model_info():
        facts = model_info()[recipe]
        said = f"published top-1 {facts.top1} ({facts.top1_source})" if facts.top1 else "no published top-1"
        return f"not yet run; {said}"
    return "not yet run"
