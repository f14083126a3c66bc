"""What `linvit bench attention` and `linvit bench backbone` have in common: options, progress, and what they print."""

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from linvit.attention.kernels.formula import INTERPRETED
from linvit.cli.spec import usable_device
from linvit.errors import UserError, check_number
from linvit.experiments.bench.costs import Cost
from linvit.experiments.bench.report import CostReport
from linvit.experiments.bench.runner import Settings
from linvit.machine import keep_memory
from linvit.runs.conditions import conditions, cpu_load
from linvit.terminal import reflow, terminal_width

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
CTRL_C = 130  # the exit code of a program that it ended
INTERRUPTED = "interrupted"  # of the conditions


def add_options(parser: argparse.ArgumentParser, *, batch: int, budget: int) -> None:
    """The options of both verbs."""
    parser.add_argument("--batch", type=int, default=batch, help="images per call (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES), help="of weights and inputs (%(default)s)")
    parser.add_argument("--autocast", action="store_true", help="weights in float32, the rest under autocast to DTYPE")
    parser.add_argument(
        "--compile",
        dest="modes",
        action="append_const",
        const="compiled",
        default=["eager"],
        help="beside each module the same by torch.compile, and the ratio of the two; takes minutes",
    )
    parser.add_argument(
        "--no_recompute",
        dest="modes",
        action="append_const",
        const="no recompute",
        help="beside each module the same with recompute_attention=false: it keeps more for backward and is faster",
    )
    parser.add_argument(
        "--kernel",
        dest="modes",
        action="append_const",
        const="triton",
        help="beside each module the same with attention_kernel=triton, where it has a kernel, after a check of its "
        "values; what a GPU finds is recorded for attention_kernel=auto",
    )
    parser.add_argument("--forward_only", action="store_true", help="leave out the backward pass")
    parser.add_argument("--threads", type=int, help="of torch on the CPU (torch's default)")
    parser.add_argument(
        "--cpu_time",
        action="store_true",
        help="count the seconds of the processor and not of the clock: for one thread on a CPU that is busy",
    )
    parser.add_argument(
        "--budget", type=float, default=budget, metavar="SECONDS", help="for all timing together (%(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for tables and plots (bench/DATE)")


def settings(args: argparse.Namespace) -> Settings:
    """How modules run."""
    check_number("--batch", args.batch, at_least=1, whole=True)
    check_number("--budget", args.budget, above=0)
    if args.threads is not None:
        check_number("--threads", args.threads, at_least=1, whole=True)
        torch.set_num_threads(args.threads)
    device = torch.device(usable_device(args.device))
    if device.type == "cpu":
        keep_memory()  # as a run of `linvit fit` does
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device must be cpu or cuda, which linvit can measure; got {args.device}")
    if args.cpu_time and (device.type != "cpu" or torch.get_num_threads() > 1):
        raise UserError("--cpu_time is for one thread on a CPU; add --threads 1, or leave it out")
    if args.autocast and args.dtype not in ("bfloat16", "float16"):
        raise UserError(f"--autocast runs in half precision; got --dtype {args.dtype}. Write --dtype bfloat16")
    if "triton" in args.modes and device.type != "cuda" and not INTERPRETED:
        raise UserError(f"--kernel measures kernels for a GPU; got --device {args.device}. Add --device cuda")
    if "no recompute" in args.modes and args.forward_only:
        raise UserError("--no_recompute changes the backward pass alone, which --forward_only leaves out")
    if "compiled" in args.modes and "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        raise UserError(
            f"--compile needs a torch.compile that has isolate_recompiles, as torch 2.15; this is {torch.__version__}"
        )
    dtype, backward = DTYPES[args.dtype], not args.forward_only
    return Settings(args.device, dtype, args.autocast, tuple(args.modes), backward, batch=args.batch)


def measured(
    args: argparse.Namespace,
    what: str,
    measure: Callable[..., tuple[list[Cost], bool]],
    *arguments: Any,
    **options: Any,
) -> tuple[list[Cost], dict[str, str]]:
    """Costs, and the conditions under which they were measured, a Ctrl-C that ended the measurement among them."""
    how = f"batch {args.batch}, {args.dtype}{' autocast' * args.autocast}, {' and '.join(args.modes)}"
    how += ", processor time of one thread" * args.cpu_time
    known = conditions(args.device) | {"settings": f"{what}, {how}", "batch": str(args.batch)}
    clock = time.process_time if args.cpu_time else time.perf_counter
    with tqdm(bar_format="{desc}", leave=False, disable=None) as line:

        def report(text: str) -> None:
            line.set_description_str(text, refresh=False)
            line.update(0)  # shows it, ten times a second at most

        costs, interrupted = measure(*arguments, **options, budget=args.budget, clock=clock, report=report)
    return costs, known | {"load at the end": cpu_load()} | ({INTERRUPTED: "yes, by Ctrl-C"} if interrupted else {})


def parse_sizes(option: str, text: str) -> list[tuple[int, int]]:
    """Sizes (H, W), each once, from sides and sizes such as "14,14x28"."""
    found = []
    for part in text.lower().split(","):
        sides = part.strip().split("x")
        if len(sides) > 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
            raise UserError(
                f"{option} takes sizes such as 14 or 14x28 (height x width), separated by commas; got '{part}'"
            )
        found.append((int(sides[0]), int(sides[-1])))
    return list(dict.fromkeys(found))


def finish(report: CostReport, output: Path | None, plots: Mapping[str, str] | None = None) -> int:
    """Prints the tables, writes the files, `plots` besides, and returns the exit code."""
    interrupted = INTERRUPTED in report.conditions
    if not interrupted and not any(cost.peak for cost in report.costs):
        raise UserError("nothing could be measured:\n  " + "\n  ".join(report.notes()))
    for key, value in report.conditions.items():
        print(reflow(f"{key}: {value}"))
    for title, note, rows, _ in report.sections(spread=False):
        print("\n".join(["", title, *([reflow(note)] if note else []), text_table(rows)]))
    if report.notes():
        print("\nnot measured:\n  " + "\n  ".join(report.notes()))
    folder = output or Path("bench") / datetime.now(UTC).strftime("%Y-%m-%d-%H%M%S")
    report.write(folder)
    for name, text in (plots or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"\ntables with quartiles and operations, and plots: {folder}")
    if interrupted:
        print("interrupted: the tables have what was measured until then", file=sys.stderr)
    return CTRL_C if interrupted else 0


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Numbers to the right of names; a name that leaves them too little room in the terminal stands above them."""
    columns = [max(map(len, column)) for column in zip(*(row[1:] for row in rows), strict=True)]
    room = terminal_width() - sum(columns) - 2 * len(columns) - 2
    width = min(max(len(row[0]) for row in rows), max(room, 0))
    lines = []
    for name, *cells in rows:
        if len(name) > width:
            lines.append(f"  {name}")
            name = ""
        numbers = "".join(f"  {cell:>{column}}" for cell, column in zip(cells, columns, strict=True))
        lines.append(f"  {name:<{width}}{numbers}".rstrip())
    return "\n".join(lines)
