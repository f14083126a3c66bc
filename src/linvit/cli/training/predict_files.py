"""`linvit predict --model RUN IMAGES`: predicts files with a trained network, without a configuration."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from linvit.cli.spec import usable_device
from linvit.data.sources.folder import EXTENSIONS, files_below
from linvit.errors import UserError, quote_first
from linvit.inference.model import load
from linvit.io.files import check_writable
from linvit.io.plain_text import shown
from linvit.io.terminal import argument_parser
from linvit.registry.signatures import parameters_of
from linvit.runs import yaml_text

EPILOG = """examples:
  linvit predict --model RUN photos --output out
  linvit predict --model RUN/checkpoints/best.ckpt a.jpg b.png --device cuda
  linvit predict --model RUN huge.tif --model.window=512

--model.NAME=VALUE sets options of the task that do not change weights, such as
the window of segmentation; --data.NAME=VALUE options of the preparation, such as
--data.max_pixels. linvit predict --config RUN/config.yaml --ckpt_path RUN, with
all options of a run, predicts the images of a data source.
"""


def main(argv: list[str]) -> None:
    """Runs `linvit predict --model`; prints the path of the predictions."""
    parser = argument_parser("linvit predict", __doc__, EPILOG)
    parser.allow_abbrev = False
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="files, or folders of them")
    about = "a run, one of its checkpoints, or a .safetensors"
    parser.add_argument("--model", required=True, metavar="RUN", help=about)
    parser.add_argument("--output", type=Path, default="predictions", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--weights", choices=["raw", "ema"], help="(default: those with which the run predicts)")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="(default: %(default)s)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="(default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--compile", action="store_true", help="compile the network")
    parser.add_argument("--on_error", choices=["raise", "skip"], default="raise", help="for images that cannot be read")
    parser.add_argument("--allow", action="append", default=[], metavar="CLASS", help="a class path to import")
    others = [option for option in argv if option.startswith(("--model.", "--data."))]
    args = parser.parse_args([option for option in argv if option not in others])
    given: dict[str, dict[str, Any]] = {"--model": {}, "--data": {}}
    for option in others:
        name, equals, value = option.partition("=")
        section, _, own = name.partition(".")
        if not equals:
            raise UserError(f"write {name}=VALUE, with a =")
        if section == "--model" and own in parameters_of(load):
            raise UserError(f"{option}: the task has no option '{own}'; --device, --compile, --weights are linvit's")
        given[section][own] = yaml_text.load(value, f"'{option}'")
    check_writable(args.output, "--output")
    model = load(
        args.model,
        weights=args.weights,
        device=usable_device(args.device),
        dtype=torch.bfloat16 if args.bf16 else None,
        compile=args.compile,
        preprocessing=given["--data"],
        allow=args.allow,
        **given["--model"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: tqdm.write(f"linvit: warning: {message}", sys.stderr)
        for source in args.images if any(path.is_dir() for path in args.images) else [None]:
            paths = [*images_in(args.images if source is None else [source])]
            results = model(iter(paths), batch_size=args.batch_size, on_error=args.on_error)
            bar = tqdm(results, total=len(paths), unit=" images", disable=None)  # no progress bar without a terminal
            found = (each for each in bar if each is not None)
            first = next(found, None)
            if first is None:
                raise UserError(f"no image in {quote_first([*map(str, args.images)])} can be predicted")
            path = type(first).save_all(chain([first], found), args.output, None if source is None else str(source))
            print(f"wrote the predictions to {shown(path)}")


def images_in(paths: Sequence[Path]) -> Iterator[Path]:
    """Yields images given as files or found in folders (not hidden), sorted by name, as absolute paths."""
    for path in map(Path.absolute, paths):
        inside = [*map(Path, files_below(path))] if path.is_dir() else [path]
        if not inside:
            raise UserError(f"'{path}' contains no images: it has no files {', '.join(sorted(EXTENSIONS))}")
        yield from inside
