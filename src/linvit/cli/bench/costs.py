"""`linvit bench attention` and `linvit bench backbone`: time, memory and operations over tokens or the image size."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from linvit.attention.kernels.choice import kernel_names
from linvit.attention.kernels.formula import INTERPRETED
from linvit.cli.spec import parse_sizes, read_spec, read_value, usable_device
from linvit.errors import UserError, check_number
from linvit.experiments.bench import builders
from linvit.experiments.bench.builders import BASELINES, backbone_label, spec_label
from linvit.experiments.bench.costs import costs_over_sizes
from linvit.experiments.bench.report import CostReport
from linvit.experiments.bench.runner import DTYPES, Build, Mode, Settings
from linvit.experiments.measure import BUSY, processor_share
from linvit.io.machine import keep_memory
from linvit.io.terminal import argument_parser, reflow, table
from linvit.registry import attentions, backbones
from linvit.runs.conditions import conditions, cpu_load

BUSY_MACHINE = (
    "other processes use the CPU: this one got {:.0%} of the time that it needs. {}; growth exponents of times "
    "are left out. Repeat it on an idle machine"
)
CPU_TIME = "Times are CPU time of one thread, as with --threads 1 --cpu_time"
CLOCK_TIME = "Wall-clock times are too long (--threads 1 --cpu_time measures CPU time)"
CTRL_C = 130  # exit code after Ctrl-C
INTERRUPTED = "interrupted"  # entry of the conditions
GRIDS = "14x14,14x28,28x28,28x56,56x56"
NAMES = ("deit_tiny", "flatten_deit_tiny", "pvt_tiny", "flatten_pvt_tiny", "swin_tiny", "flatten_swin_tiny")
MODES: dict[str, tuple[Mode, str]] = {
    "compile": ("compiled", "by torch.compile; takes minutes"),
    "no_recompute": ("no recompute", "with recompute_attention=false: it keeps more for backward and is faster"),
}
KERNEL = (
    "measure kernels next to each module: attention_kernel=triton, and those of other packages, where it has one, "
    "after a check of their values; attention_kernel=triton enables them"
)
ATTENTION = """examples:
  linvit bench attention                     all mechanisms up to 3,136 tokens:
                                             minutes on a CPU
  linvit bench attention '{name: focused, focusing_factor: 4}' \\
    my_package.my_module:MyAttention --grids 14,28,56x112
  linvit bench attention --device cuda --dtype bfloat16 --autocast --layer
  linvit bench attention focused linear --layer --batch 4 --compile
                                             torch.compile: how much faster?
  linvit bench attention focused --device cuda --dtype bfloat16 --kernel
                                             its kernels: faster here?
  linvit bench attention focused --layer --no_recompute
                                             recomputing in backward: memory
                                             saved, and time lost

torch's scaled_dot_product_attention ("torch's SDPA") and a naive softmax are
measured for comparison. The output has medians, the number of tokens from
which a mechanism costs less than these (the crossover), and the growth of its
costs with the number of tokens (the exponent). Tables (Markdown, and CSV with
quartiles) and plots (SVG) are written.

At each size modules take turns, in at least three rounds. Memory is the peak
of a call beyond its inputs and weights. The tables list failed measurements
with the reason. Ctrl-C keeps the results so far.
"""
BACKBONE = """examples:
  linvit bench backbone                      DeiT, PVT and Swin, with their own
                                             and with focused attention
  linvit bench backbone swin_tiny flatten_swin_tiny --img_sizes 224,512x768
  linvit bench backbone deit_tiny '{name: timm, model: vit_tiny_patch16_224}'
  linvit bench backbone my_package.my_module:MyBackbone --attention hydra
  linvit bench backbone deit_tiny --device cuda --batch 64 --compile

A training step is forward, cross entropy, backward and AdamW. Tables and plots
are those of linvit bench attention, over the image size; the crossover is with
the first backbone. accuracy.svg shows ImageNet-1K top-1 as published by the
authors (not measured by linvit) over the time measured here.
"""


def attention(argv: list[str]) -> int:
    """Runs `linvit bench attention`; prints the tables, returns 0, or 130 after Ctrl-C."""
    parser = _parser("attention", ATTENTION)
    parser.add_argument("--grids", default=GRIDS, help="patch grids, a side or HxW, with commas (%(default)s)")
    parser.add_argument("--dim", type=int, default=96, help="channels over all heads (%(default)s, as in Swin-T)")
    parser.add_argument("--heads", type=int, default=3, help="heads (%(default)s)")
    parser.add_argument("--layer", action="store_true", help="measure with the projections of the layer")
    args = parser.parse_intermixed_args(argv)
    check_number("--dim", args.dim, at_least=1, whole=True)
    check_number("--heads", args.heads, at_least=1, whole=True)
    specs = [read_spec(attentions, name) for name in args.names or attentions.names()]
    grids, settings = parse_sizes("--grids", args.grids), _settings(args)
    build, named = builders.layer if args.layer else builders.mechanism, {spec_label(spec): spec for spec in specs}
    modules = {
        name: partial(build, spec, args.dim, args.heads, settings) for name, spec in (named | dict(BASELINES)).items()
    }
    what = f"{'attention layers' if args.layer else 'mechanisms alone'}, {args.dim} channels, {args.heads} heads"
    about: Any = {"title": "Attention", "axis": "tokens N", "baselines": list(BASELINES)}
    report = _measured(args, what, modules, grids, settings, **about)
    code = _finish(report, args.output)
    if settings.kernels:
        print(reflow(builders.kernel_ratios(report.costs, specs, settings)))
    return code


def backbone(argv: list[str]) -> int:
    """Runs `linvit bench backbone`; prints the tables, returns 0, or 130 after Ctrl-C."""
    parser = _parser("backbone", BACKBONE)
    sizes_help = "image sizes, a side or HxW, with commas (%(default)s)"
    parser.add_argument("--img_sizes", default="224,320,448", help=sizes_help)
    parser.add_argument("--attention", metavar="SPEC", help="another attention for all: NAME, {name: ...}, or a list")
    args = parser.parse_intermixed_args(argv)
    specs = [read_spec(backbones, name) for name in args.names or NAMES]
    replaced = None if args.attention is None else read_value("--attention", args.attention)
    sizes, settings = parse_sizes("--img_sizes", args.img_sizes), _settings(args)._replace(optimizer=True)
    modules = {backbone_label(spec): partial(builders.backbone, spec, replaced, settings) for spec in specs}
    what = "backbones with classifier" + ("" if replaced is None else f", attention {args.attention}")
    about: Any = {"title": "Backbones", "axis": "pixels", "baselines": [*modules][:1]}
    report = _measured(args, what, modules, sizes, settings, **about)
    return _finish(report, args.output, builders.accuracy_plot(report) if replaced is None else {})


def _parser(verb: str, epilog: str) -> argparse.ArgumentParser:
    parser = argument_parser(f"linvit bench {verb}", __doc__, epilog)
    parser.add_argument("names", nargs="*", help="names, package.module:Class, or {name: ..., option: value}")
    parser.add_argument("--batch", type=int, default=1, help="images per call (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES), help="of weights and inputs (%(default)s)")
    parser.add_argument("--autocast", action="store_true", help="weights in float32, the rest under autocast to DTYPE")
    for name, (_, about) in MODES.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"measure each module also {about}")
    parser.add_argument("--kernel", action="store_true", help=KERNEL)
    parser.add_argument("--forward_only", action="store_true", help="skip the backward pass")
    parser.add_argument("--threads", type=int, help="torch's threads on the CPU (torch's default)")
    about = "measure CPU time instead of wall-clock time: for one thread on a busy CPU"
    parser.add_argument("--cpu_time", action="store_true", help=about)
    parser.add_argument("--budget", type=float, default=60, metavar="SECONDS", help="limit of all timing (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder of tables and plots (bench/DATE)")
    return parser


def _settings(args: argparse.Namespace) -> Settings:
    modes = ["eager", *(mode for name, (mode, _) in MODES.items() if getattr(args, name))]
    modes += kernel_names() if args.kernel else []
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
        raise UserError("--cpu_time is for one thread on a CPU; add --threads 1, or remove it")
    if args.autocast and args.dtype not in ("bfloat16", "float16"):
        raise UserError(f"--autocast runs in half precision; got --dtype {args.dtype}. Write --dtype bfloat16")
    if args.kernel and kernel_names() == ["triton"] and device.type != "cuda" and not INTERPRETED:
        raise UserError(f"--kernel measures kernels for a GPU; got --device {args.device}. Add --device cuda")
    dtype, backward = DTYPES[args.dtype], not args.forward_only
    return Settings(args.device, dtype, args.autocast, tuple(modes), backward, batch=args.batch)


def _measured(
    args: argparse.Namespace,
    what: str,
    modules: Mapping[str, Build],
    sizes: Sequence[tuple[int, int]],
    settings: Settings,
    **about: Any,
) -> CostReport:
    """Returns costs and the conditions of their measurement, including an interruption by Ctrl-C."""
    for build in modules.values():
        builders.check_builds(build, sizes)
    share = processor_share() if torch.device(args.device).type == "cpu" else 1.0
    if share < BUSY and args.threads is None and not args.cpu_time:
        args.cpu_time = True
        torch.set_num_threads(1)
    how = f"batch {args.batch}, {args.dtype}{' autocast' * args.autocast}, {' and '.join(settings.modes)}"
    how += ", CPU time of one thread" * args.cpu_time
    known = conditions(args.device) | {"settings": f"{what}, {how}", "batch": str(args.batch)}
    measuring: Any = {"budget": args.budget, "clock": time.process_time if args.cpu_time else time.perf_counter}
    with tqdm(bar_format="{desc}", leave=False, disable=None) as line:

        def report(text: str) -> None:
            line.set_description_str(text, refresh=False)
            line.update(0)  # updates the display, at most ten times per second

        found, interrupted = costs_over_sizes(modules, sizes, settings, skipped=BASELINES, report=report, **measuring)
    known |= {"load at the end": cpu_load()} | ({INTERRUPTED: "yes, by Ctrl-C"} if interrupted else {})
    if torch.device(args.device).type == "cpu":
        share = min(share, processor_share())
    if share < BUSY:
        known["warning"] = BUSY_MACHINE.format(share, CPU_TIME if args.cpu_time else CLOCK_TIME)
        print(f"linvit: warning: {known['warning']}", file=sys.stderr)
    return CostReport(costs=found, conditions=known, fitted=share >= BUSY, **about)


def _finish(report: CostReport, output: Path | None, plots: Mapping[str, str] | None = None) -> int:
    interrupted = INTERRUPTED in report.conditions
    if not interrupted and not any(cost.peak for cost in report.costs):
        raise UserError("nothing could be measured:\n  " + "\n  ".join(report.notes()))
    for key, value in report.conditions.items():
        print(reflow(f"{key}: {value}"))
    for title, note, rows, _ in report.sections():
        print("\n".join(["", title, *([reflow(note)] if note else []), *_aligned(rows)]))
    if report.notes():
        print("\nnot measured:\n  " + "\n  ".join(report.notes()))
    folder = output or Path("bench") / datetime.now(UTC).strftime("%Y-%m-%d-%H%M%S")
    report.write(folder, plots or {})
    print(f"\ntables with operations, and plots: {folder}")
    if interrupted:
        print("interrupted: the tables have the results so far", file=sys.stderr)
    return CTRL_C if interrupted else 0


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    return table([(f"  {name}", *cells, "") for name, *cells in rows])
