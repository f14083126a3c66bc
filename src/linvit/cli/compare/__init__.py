"""`linvit compare`: runs variants of one configuration with several seeds, and writes one table of them."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linvit.errors import UserError, check_choice, check_number
from linvit.experiments.compare.grid import UNSAFE, Sweep, expand_names, split, without_convolution
from linvit.io.terminal import argument_parser
from linvit.registry.model_info import CONFIGS
from linvit.registry.removed import without_removed
from linvit.runs import yaml_text
from linvit.runs.configs import config_file, find, text

EPILOG = """the grid:
  Any option of linvit fit can be given. An option with several values varies:
  separate values by commas, or repeat the option. Commas within brackets,
  braces and quotes belong to a value, so a list or a mapping is one value.
  An option with one value applies to all runs. A * in an attention, backbone
  or head matches registered names: --model.attention='*' is all of them.

examples:
  linvit compare --config quickstart --seeds 3 \\
    --model.attention=softmax,linear,focused
  linvit compare ablations/flatten_table_4 --data.source=path/to/imagenet
  linvit compare linearize/quickstart --seeds 3 --model.attention='*'
  linvit compare diagnostics/recall --model.attention='*' --data.pairs=8,32 \\
    --tune model.lr=1e-3,2e-3,4e-3 --seeds 3
  linvit compare ablations/flatten_table_4 --engine ray --address auto
  linvit compare ablations/flatten_table_4 --engine slurm --partition gpu
  linvit compare --report checkpoints/compare/flatten_table_4
  linvit compare --report checkpoints/quickstart checkpoints/mine/version_3

The same grid as a file, with keys that a command line may override:
  config: quickstart            a configuration, or a list
  set: {trainer.max_epochs: 20} options of all runs
  vary: {model.attention: [softmax, linear, focused]}
  tune: {model.lr: [0.001, 0.002, 0.004]}
  variants:                     or options by the name of a variant; together
    plain: {model.lr: 1.0e-3}   with vary all combinations are run
  seeds: 3                      seeds 0, 1, 2, or a list
  baseline: plain               default: the runs' teacher, or the first one
  score: val/score              a column of metrics.csv
  published: {source: Table 4 of the paper, scores: {plain: 72.2}}

Each run is a linvit fit in checkpoints/compare/NAME/VARIANT-seedN, with its
configuration, its log and its run. The same command again starts the missing
runs; a run that was interrupted resumes from its checkpoint. Tables
(Markdown, CSV), plots and report.html are written beside the runs.

The score of a run is that of its last epoch, not of its best. A run that
is not finished has no score, and the exit code is 1. A star
marks a difference that is significant at 5 % by Holm's correction. A teacher
(linvit linearize) that does not exist yet is trained first. The machines of a
Ray cluster (pip install 'linvit[ray]') or of SLURM ('linvit[slurm]') must share
the folder of the runs.
"""

TIMES, FLAG = {"action": "append", "default": []}, {"action": "store_true"}
OPTIONS: dict[str, tuple[str, str, Any]] = {
    "config": ("CONFIG", "configuration of all runs, instead of the file's; parts (base/...) are added to it", TIMES),
    "seeds": ("SEEDS", "number of seeds (default: 1), or a list: 0,1,5", {}),
    "baseline": ("VARIANT", "variant to compare with (default: the runs' teacher, or the first)", {}),
    "score": ("TAG", "column of metrics.csv whose last value is compared (default: of the weights that predict)", {}),
    "tune": ("OPTION=VALUE,VALUE", "each variant uses the value that is best in a run with another seed", TIMES),
    "without_convolution": ("", "remove convolutions from --model.attention, except linear_angular's", FLAG),
    "name": ("NAME", "name of the folder in checkpoints/compare (default: that of the file)", {}),
    "jobs": ("N", "number of parallel runs (default: one per GPU; on a CPU 1)", {"type": int}),
    "gpus_per_run": ("N", "GPUs of each run (default: 1)", {"type": int, "default": 1}),
    "engine": ("NAME", "engine that starts the runs: local (default), ray or slurm", {"default": "local"}),
    "address": ("ADDRESS", "address of a Ray cluster, or auto (default: start Ray here)", {}),
    "cpus_per_run": ("N", "CPUs of each run on Ray or SLURM (default: 1)", {"type": int, "default": 1}),
    "partition": ("NAME", "partition of SLURM (default: the cluster's)", {}),
    "minutes": (
        "N",
        "minutes of each SLURM job (default: 240); a longer run resumes in another job",
        {"type": int, "default": 240},
    ),
    "retry": ("", "start failed runs again", FLAG),
    "dry_run": ("", "check and list the runs without starting them", FLAG),
    "skip_costs": ("", "do not measure latency and memory", FLAG),
    "report": ("DIR", "write the table of existing runs only", {"nargs": "+"}),
}
"""Options of this verb; all others are those of `linvit fit`."""


def main(argv: list[str]) -> int:
    """Runs `linvit compare`; returns 0, or 1 if runs are incomplete, or the exit code of the signal that ended it."""
    args, options = parse(argv)
    for name in ("jobs", "gpus_per_run", "cpus_per_run", "minutes"):
        if getattr(args, name) is not None:
            check_number(f"--{name}", getattr(args, name), at_least=1, whole=True)
    check_choice("--engine", args.engine, ("local", "ray", "slurm"))
    for name, engine in (("address", "ray"), ("partition", "slurm")):
        if getattr(args, name) is not None and args.engine != engine:
            raise UserError(f"--{name} is for another engine: add --engine={engine}")
    from linvit.cli.compare import run
    from linvit.runs.library_messages import hide_library_messages

    hide_library_messages()
    if args.report:
        if options or args.grid or args.config:
            raise UserError(f"--report takes folders only; got {shlex.join(options) or args.grid or args.config}")
        return run.report([Path(folder) for folder in args.report], args)
    spec, name = grid_of(args, options)
    return run.run(spec, args.name or name, args, shlex.join(["linvit", "compare", *argv]))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the arguments of this verb, and those of `linvit fit`, each as one `--name=value`."""
    parser = argument_parser("linvit compare", __doc__, EPILOG)
    parser.allow_abbrev = False
    parser.usage = "linvit compare [GRID] [--config CONFIG] [--OPTION=VALUE,VALUE ...]"
    parser.add_argument("grid", nargs="?", help="file with a grid, or a name: linvit list configs")
    for name, (metavar, about, settings) in OPTIONS.items():
        flags = [f"--{name}", *["-c"] * (name == "config")]
        named: Any = {"metavar": metavar} if metavar else {}
        parser.add_argument(*flags, help=about, **named, **settings)
    known = {*(f"--{name}" for name in OPTIONS), "-c", "-h", "--help"}
    own, options = [], []
    rest = iter(argv)
    for argument in rest:
        name, given, _ = argument.partition("=")
        if not re.match(r"--\w", argument) or name in known:
            own.append(argument)
        elif given:
            options.append(argument)
        elif (value := next(rest, None)) is None:
            raise UserError(f"{name} has no value; write {name}=value")
        else:
            options.append(f"{name}={value}")
    return parser.parse_args(own), options


def grid_of(args: argparse.Namespace, options: Sequence[str]) -> tuple[Sweep, str]:
    """Returns the grid of a file with the changes of the command line, and its name."""
    spec = Sweep()
    if args.grid is not None:
        path = config_file(args.grid)
        content = yaml_text.load(text(path), f"'{path}'")
        if isinstance(content, dict) and content.keys() & {"base", "model", "data", "trainer"}:  # keys that no grid has
            args.config, args.grid = [args.grid, *args.config], None
        else:
            if isinstance(content, dict):
                content = without_removed(content, f"'{path}'", "compare")
            spec = Sweep.read(content, f"'{path}'")
        spec.config = [_found(config, path.parent) for config in spec.config]
    args.config = [_found(config) for config in args.config]
    parts = [config for config in args.config if (config_file(config)).resolve().is_relative_to(CONFIGS / "base")]
    spec.config = [*(spec.config if len(parts) == len(args.config) else []), *args.config]
    if not spec.config:
        raise UserError("linvit compare needs a grid or a configuration: linvit compare --config quickstart ...")
    for key, values in _options(options).items():
        if expand_names(key, values) != values or len(values) > 1:  # a pattern such as * may match several names
            spec.vary[key] = values
        else:
            spec.set[key] = values[0]
    if args.without_convolution:
        key = "model.attention"
        if key not in spec.vary | spec.set:
            raise UserError(f"--without_convolution changes the attentions of a grid: add --{key}=NAME,NAME or '*'")
        values = expand_names(key, spec.vary.get(key) or [spec.set.pop(key)])
        spec.vary[key] = [without_convolution(value) for value in values]
    if wrong := [text for text in args.tune if not re.fullmatch(r"[\w.]+=.+", text)]:
        raise UserError(f"--tune takes an option and its values, such as model.lr=1e-3,2e-3; got '{wrong[0]}'")
    spec.tune |= _options([f"--{text}" for text in args.tune])
    if args.seeds is not None:
        spec.seeds = _seeds(args.seeds)
    spec.baseline = args.baseline or spec.baseline
    spec.score = args.score or spec.score
    plain = "-without_convolution" * args.without_convolution + "-tuned" * bool(spec.tune)
    if args.grid is not None:
        return spec, Path(args.grid).stem + plain
    last = next(config for config in reversed(spec.config) if config not in parts or len(parts) == len(spec.config))
    return spec, UNSAFE.sub("-", "-".join([Path(last).stem, *(key.rpartition(".")[2] for key in spec.vary)])) + plain


def _found(config: str, folder: Path | None = None) -> str:
    """Returns the path of a configuration, valid in any working folder; a name of linvit's configurations unchanged."""
    path = find(config, folder)
    return config if path is None or path.is_relative_to(CONFIGS) else str(path.absolute())


def _options(options: Sequence[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for option in options:
        key, _, text = option.removeprefix("--").partition("=")
        if key in ("ckpt_path", "resume", "seed_everything", "trainer.default_root_dir"):
            way = "--seeds" if key == "seed_everything" else "--name" if "root" in key else "nothing"
            raise UserError(f"--{key} is set by linvit compare for each run; use {way} instead")
        for value in split(text):  # a leading * is a pattern here, but an alias in YAML
            found.setdefault(key, []).append(value if value[:1] == "*" else yaml_text.load(value, f"--{key}"))
    return found


def _seeds(text: str) -> int | list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds must be a number, or numbers between commas, such as 0,1,5; got '{text}'") from None
    return seeds[0] if len(seeds) == 1 else seeds
