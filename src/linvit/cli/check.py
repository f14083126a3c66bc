"""`linvit check`: tests attention mechanisms and backbones, including plug-ins, against their contracts."""

from linvit.cli.spec import read_spec, read_value
from linvit.errors import UserError
from linvit.io.terminal import argument_parser, reflow, table
from linvit.registry import attentions, backbones
from linvit.testing import check_attention, check_backbone
from linvit.testing.report import Report

EPILOG = """examples:
  linvit check focused                       shapes, grids, numerics, ...
  linvit check focused --quick               in seconds: without the largest
                                             sizes
  linvit check '{name: focused, focusing_factor: 4}'
  linvit check my_package.my_module:MyAttention
                                             a class that is not registered, in
                                             this folder or installed
  linvit check                               every registered mechanism
  linvit check --backbone deit_nano --attention focused --img_size 32
                                             in a backbone: also torch.compile,
                                             export and ONNX

exit code: 0 if nothing failed, else 1. Properties that a mechanism does not
declare do not fail. In Python: linvit.testing.check_attention("focused"),
check_backbone("swin_tiny", attention="focused")
"""


def main(argv: list[str]) -> int:
    """Runs `linvit check`; prints a table per subject; returns 1 if a line failed, else 0."""
    parser = argument_parser("linvit check", __doc__, EPILOG)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("name", nargs="?", help="a name, package.module:Class, or {name: ..., option: value} (all)")
    one.add_argument("--backbone", metavar="NAME", help="check a backbone instead; written like a mechanism")
    parser.add_argument("--attention", metavar="SPEC", help="attention of the backbone: NAME, {name: ...}, or a list")
    parser.add_argument("--img_size", metavar="SIZE", help="image size of the backbone: a side or [H, W] (default: 64)")
    parser.add_argument("--quick", action="store_true", help="skip the largest sizes, torch.compile, export, ONNX")
    args = parser.parse_args(argv)

    given = {each: text for each in ("attention", "img_size") if (text := getattr(args, each)) is not None}
    if given and args.backbone is None:
        raise UserError(f"--{min(given)} is for a backbone: add --backbone NAME")
    if args.backbone is not None:
        options = {option: read_value(f"--{option}", text) for option, text in given.items()}
        report = check_backbone(read_spec(backbones, args.backbone), **options, quick=args.quick)
    elif args.name is not None:
        report = check_attention(read_spec(attentions, args.name), quick=args.quick)
    else:
        return _check_all(args.quick)
    print(_table(report))
    return int(not report.passed)


def _check_all(quick: bool) -> int:
    """Checks every registered mechanism; one that cannot be imported fails, and the others are still checked."""
    failed = []
    names = attentions.names()
    for name in names:
        try:
            report = check_attention(name, quick=quick)
            print(f"{_table(report)}\n", flush=True)
            failed += [] if report.passed else [f"{name} ({', '.join(report.failures)})"]
        except UserError as error:
            print(f"{name}: FAILED\n  {error}\n", flush=True)
            failed.append(name)
    print(f"{len(names) - len(failed)} of {len(names)} passed")
    if failed:
        print(reflow(f"failed: {'; '.join(failed)}"))
    return int(bool(failed))


def _table(report: Report) -> str:
    title = reflow(str(report).partition("\n")[0])
    rows = [
        (f"  {name}", verdict.value, f"{note} ({seconds:.0f} s)".strip() if seconds >= 1 else note)
        for name, verdict, note, seconds, _ in report.lines
    ]
    return "\n".join([title, *table([("  check", "verdict", "found"), *rows])])
