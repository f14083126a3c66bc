"""`linvit check`: holds attention mechanisms to their contract, a plug-in's like linvit's own."""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

import jsonargparse

from linvit.errors import UserError
from linvit.registry import Spec, attentions
from linvit.testing import check_attention

EPILOG = """examples:
  linvit check focused                                   shapes, grids, numerics, rank, cost, torch.compile, ...
  linvit check focused --quick                           without torch.compile, torch.export and the largest sizes
  linvit check focused --options '{"focusing_factor": 4}'
  linvit check '{name: focused, focusing_factor: 4}'     the same, as a configuration has it
  linvit check my_package.my_module:MyAttention          a class that nobody registered, in this folder or installed
  linvit check                                           every registered mechanism

exit code: 0 if nothing failed, 1 if something did. What a mechanism does not declare does not fail.
In Python: from linvit.testing import check_attention; report = check_attention("focused")
"""


def main(argv: list[str]) -> int:
    """Runs `linvit check`; prints a table per mechanism and returns 1 if a line of it failed, else 0.

    Raises:
        UserError: If the mechanism is unknown, cannot be imported, or refuses its options.
    """
    parser = argparse.ArgumentParser(
        "linvit check", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "name",
        nargs="?",
        help="a registered name, package.module:Class, or {name: ..., option: value}; all registered if left out",
    )
    parser.add_argument("--options", metavar="MAPPING", help="options of the mechanism, as JSON or YAML")
    parser.add_argument(
        "--quick", action="store_true", help="leave out torch.compile, torch.export and the largest sizes"
    )
    args = parser.parse_args(argv)

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the class may be in a file that is still being written here
    if args.name is not None:
        report = check_attention(_spec(args.name, args.options), quick=args.quick)
        print(report)
        return int(not report.passed)
    if args.options is not None:
        raise UserError(f"--options are for one mechanism. Write linvit check NAME --options {args.options!r}")
    return _check_all(args.quick)


def _spec(name: str, options: str | None) -> Spec:
    """The spec of a name or a mapping, with the options added."""
    spec: Spec = _mapping("the mechanism", name) if name.lstrip().startswith("{") else name
    if options is None:
        return spec
    name, given = attentions.parse(spec)
    return {"name": name, **given, **_mapping("--options", options)}


def _mapping(what: str, text: str) -> Mapping[str, Any]:
    """JSON or YAML, read as a configuration is: `1e-6` is a number."""
    hint = "Write it like '{focusing_factor: 4}', in quotes"
    try:
        value = jsonargparse.get_loader("yaml")(text)
    except Exception as error:  # the loader's own kinds
        raise UserError(f"{what} {text!r} is neither JSON nor YAML. {hint}") from error
    if not isinstance(value, Mapping):
        raise UserError(f"{what} must be a mapping; got {text!r}. {hint}")
    return value


def _check_all(quick: bool) -> int:
    """Every registered mechanism; one that cannot be imported fails, and the others go on."""
    failed = []
    names = attentions.names()
    for name in names:
        try:
            report = check_attention(name, quick=quick)
        except UserError as error:
            print(f"{name}: FAILED\n  {error}\n", flush=True)
            failed.append(name)
            continue
        print(f"{report}\n", flush=True)
        if not report.passed:
            failed.append(f"{name} ({', '.join(report.failures)})")
    print(f"{len(names) - len(failed)} of {len(names)} passed" + (f"; failed: {'; '.join(failed)}" if failed else ""))
    return int(bool(failed))
