"""`linvit list`: the names that a configuration can use, who owns them."""

import inspect
from collections.abc import Iterator
from pathlib import Path

from linvit import source
from linvit.cli.list_configs import one, overview
from linvit.entries import Entry
from linvit.errors import UserError, check_choice
from linvit.model_info import model_info
from linvit.registry import attentions, backbones, heads
from linvit.signatures import descriptions, parameters_of
from linvit.terminal import argument_parser, reflow, table

REGISTRIES = {"attentions": attentions, "backbones": backbones, "heads": heads}
KINDS = [*REGISTRIES, "configs"]
COLUMNS = {
    "attentions": ("cost", "paper"),
    "backbones": ("params (M)", "MACs (G)", "published top-1 (%)"),
    "heads": ("paper",),
}
EPILOG = """examples:
  linvit list                                 all attentions, backbones, heads
  linvit list attentions --filter "*linear*"  names that match a wildcard
  linvit list attentions focused              formula, paper, cost and options
  linvit list backbones --filter "flatten_*"  sizes and published accuracy
  linvit list backbones flatten_swin_tiny     the same of one, and its options
  linvit list configs                         configurations for --config
  linvit list configs quickstart              the text of one
  linvit list configs images -o mine.yaml     a copy of one, for you to change
"""


def main(argv: list[str]) -> int:
    """Runs `linvit list`; returns 0."""
    parser = argument_parser("linvit list", __doc__, EPILOG)
    parser.add_argument("kind", nargs="?", help=f"one of {', '.join(KINDS)}; all but configs if left out")
    parser.add_argument("name", nargs="?", help="show the documentation and the options of this one")
    parser.add_argument("--filter", default="*", metavar="PATTERN", help='only names like "*linear*"')
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the named configuration to FILE")
    args = parser.parse_intermixed_args(argv)  # linvit list configs --output mine.yaml quickstart
    if args.kind is not None:
        check_choice("kind", args.kind, KINDS)
    if args.output is not None and (args.kind != "configs" or args.name is None):
        raise UserError("--output is for one configuration. Write linvit list configs NAME --output FILE")
    if args.name is not None and args.filter != "*":
        raise UserError(f"--filter is for lists, not for the one name '{args.name}'. Leave one of them out")
    if args.kind == "configs":
        print("\n".join(overview(args.filter)) if args.name is None else one(args.name, args.output))
    elif args.name is not None:
        print("\n".join(_one(args.kind, args.name)))
    else:
        kinds = REGISTRIES if args.kind is None else [args.kind]
        print("\n\n".join("\n".join(_section(kind, args.filter)) for kind in kinds))
    return 0


def _section(kind: str, pattern: str) -> list[str]:
    """A table with one row per name: name, owner if somebody else has any, facts, summary."""
    registry = REGISTRIES[kind]
    entries = registry.entries()
    rows = [
        (
            f"  {name}",
            " / ".join(entry.owner for entry in entries[name]),
            *_facts(kind, name, entries[name]),
            _remark(entries[name]),
        )
        for name in registry.names(pattern)
    ]
    if not rows:
        return [kind, f"  none of {len(entries)} is like '{pattern}'"]
    titles = (kind, "owner", *COLUMNS[kind], "summary")
    if all(owner == "linvit" for _, owner, *_ in rows):
        return table([(row[0], *row[2:]) for row in [titles, *rows]])
    return table([titles, *rows])


def _facts(kind: str, name: str, owners: list[Entry]) -> tuple[str, ...]:
    """What the columns of this kind say of a name; blank where nothing is known."""
    target = owners[0].target
    if kind == "attentions":
        return source.complexity(target), source.paper(target)
    if kind == "heads":
        return (source.paper(target),)
    facts = model_info().get(name) if owners[0].owner == "linvit" else None
    if kind == "backbones" and facts is not None:
        top1 = "" if facts.top1 is None else f"{facts.top1:.1f}"
        return f"{facts.parameters / 1e6:.1f}", f"{facts.macs / 1e9:.2f}", top1
    return ("",) * len(COLUMNS[kind])


def _remark(owners: list[Entry]) -> str:
    """The summary of a name, or what is wrong with it as far as that can be said without importing it."""
    if len(owners) > 1:
        return "conflict: " + " and ".join(f"{entry.owner} ({entry.target})" for entry in owners)
    missing = source.missing_package(owners[0].target)
    return f"broken: there is no module '{missing}'" if missing else source.summary(owners[0].target)


def _one(kind: str, name: str) -> Iterator[str]:
    """Everything about one name. Imports it."""
    registry = REGISTRIES[kind]
    constructor = registry.get(name)
    parameters, inherited = parameters_of(constructor), descriptions(constructor)
    entries = registry.entries().get(name, [Entry(name, name, "a class path")])
    yield f"{name} ({registry.kind})"
    yield f"  from {entries[0].target}, {entries[0].owner}"
    if kind == "backbones" and entries[0].owner == "linvit":
        yield from _published(name)
    yield ""
    text = source.documentation(entries[0].target) or "(no documentation)"
    yield reflow(text)
    yield ""
    options = {key: value for key, value in parameters.items() if key not in registry.supplied}
    yield "options:" if options else "options: none"
    for option, default in options.items():
        yield reflow(f"  {option} (required)" if default is inspect.Parameter.empty else f"  {option} = {default!r}")
        if option in inherited and f" {option}: " not in text:
            yield reflow(f"      {inherited[option]}")


def _published(name: str) -> Iterator[str]:
    """Size and accuracy of one of linvit's own backbones."""
    facts = model_info().get(name)
    if facts is None:
        return
    yield f"  {facts.parameters:,} parameters with 1000 classes"
    yield f"  {facts.macs / 1e9:.3f} G multiply-accumulates at {facts.img_size}x{facts.img_size}"
    if facts.top1 is not None:
        yield f"  published top-1 on ImageNet-1K: {facts.top1} %,"
        yield reflow(f"  {facts.top1_source}")
