"""`linvit analyze`: ranks, entropies and maps of the attention of trained models, as a page, tables and pictures."""

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from linvit.analysis.attention_statistics import STATISTICS
from linvit.analysis.maps import Query
from linvit.backbones.create import create_backbone
from linvit.backbones.trained import trained_backbone
from linvit.callbacks.common import class_names
from linvit.callbacks.dense import palette
from linvit.cli.spec import read_spec, read_value
from linvit.data import ClassificationData
from linvit.data.base import ImageData
from linvit.errors import UserError, check_number
from linvit.experiments.analyze import AnalysedModel, Analysis, analyze, read_photos, write
from linvit.io.files import check_writable
from linvit.io.plain_text import shown
from linvit.io.terminal import argument_parser, reflow, table
from linvit.registry import backbones
from linvit.runs.folder import run_config, run_of_checkpoint
from linvit.runs.options import read_config, replace_options
from linvit.runs.run import Run
from linvit.tasks.base import Description, Task
from linvit.weights.load import load_pretrained

EPILOG = """examples:
  linvit analyze --ckpt_path RUN
                              on images of the run's validation set
  linvit analyze --ckpt_path RUN --images FOLDER
                              on images of your own
  linvit analyze --ckpt_path A.ckpt B.ckpt --config mine.yaml
                              several side by side, on the same images
  linvit analyze --backbone deit_tiny --attention focused --images FOLDER
                              a model without a run, trained or not
  linvit analyze --backbone hf:FOLDER --attention softmax --images FOLDER
                              one of transformers, and its own attention

It writes index.html, which needs no other file and no network; statistics.csv,
with each head of each layer; predictions.csv; and the pictures.
"""


def main(argv: list[str]) -> int:
    """Runs `linvit analyze`; prints a table and the path of the page, and returns 0."""
    args = _arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, subjects = _backbone(args) if args.backbone is not None else _checkpoints(args)
    folder = args.output or Path(*[run_of_checkpoint(path) or "" for path in (args.ckpt_path or [])[:1]], "analysis")
    check_writable(folder, "--output")
    photos = read_photos(data, args.count, device, spread=args.images is None)
    query = Query(*args.query) if args.query else Query()
    found = [analyze(subject, photos, query) for subject in subjects]
    page = write(found, photos, folder, shlex.join(["linvit", "analyze", *argv]))
    _print(found)
    print(f"\n{shown(page)}")
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argument_parser("linvit analyze", __doc__, EPILOG)
    parser.add_argument("--ckpt_path", nargs="+", metavar="CKPT", help="runs or checkpoints, one per model")
    parser.add_argument("--config", metavar="CONFIG", help="configuration of data and task (default: the first run's)")
    parser.add_argument("--images", metavar="DIR", help="folder of images (default: the validation set)")
    parser.add_argument("--count", type=int, default=4, metavar="N", help="number of images (default: %(default)s)")
    parser.add_argument("--backbone", metavar="NAME", help="NAME or {name: ...}, timm:MODEL or hf:FOLDER")
    parser.add_argument("--attention", metavar="SPEC", help="attention of the backbone: NAME, {name: ...}, or a list")
    parser.add_argument("--pretrained", metavar="FILE", help="weights of the backbone, as --model.pretrained")
    parser.add_argument("--img_size", metavar="SIZE", help="image size of the backbone (default: its own, or 224)")
    looks = "query token, as fractions of the image (default: class token, or centre)"
    parser.add_argument("--query", nargs=2, type=float, metavar=("ROW", "COLUMN"), help=looks)
    parser.add_argument("--output", type=Path, metavar="DIR", help="output folder (default: RUN/analysis, or analysis)")
    args = parser.parse_args(argv)
    check_number("--count", args.count, at_least=1, whole=True)
    for fraction in args.query or ():
        check_number("--query: a fraction", fraction, at_least=0, at_most=1)
    if (args.backbone is None) == (not args.ckpt_path):
        raise UserError("name checkpoints, --ckpt_path RUN, or else a model without a run, --backbone NAME")
    for option in ("attention", "pretrained", "img_size"):
        if args.backbone is None and getattr(args, option) is not None:
            raise UserError(f"--{option} is for --backbone NAME; the checkpoint decides the model")
    return args


def _backbone(args: argparse.Namespace) -> tuple[ImageData, list[AnalysedModel]]:
    """Returns a backbone without a run, and images as ImageNet's recipes prepare them."""
    if args.config is not None:
        raise UserError("--config is for a checkpoint; a backbone needs none")
    known = trained_backbone(args.backbone)
    images = {"img_size": 224} if known is None else {"img_size": 224, **known.images}
    if args.img_size is not None:
        images["img_size"] = read_value("--img_size", args.img_size)
    size = images["img_size"]
    attention = None if args.attention is None else read_value("--attention", args.attention)
    spec = read_spec(backbones, args.backbone) if known is None else known.spec
    if known is not None and args.pretrained is not None:
        spec = {**known.spec, "pretrained": False}  # the file's weights instead
    network = create_backbone(spec, attention, img_size=size)
    if args.pretrained is not None:
        load_pretrained(network, args.pretrained)
    name = spec if isinstance(spec, str) else str(spec["name"])
    weights = args.pretrained or "not trained"
    if known is not None:
        name, weights = args.backbone, args.pretrained or "its own"
        known.print_images()
    about = {"backbone": name, "attention": str(attention or "its own"), "weights": weights}
    data = ClassificationData(predict_path=args.images, num_workers=0, **images)
    return data, [AnalysedModel(name, network.eval(), lambda _: Description(), (), about)]


def _checkpoints(args: argparse.Namespace) -> tuple[ImageData, list[AnalysedModel]]:
    """Returns the models of checkpoints, and the data of a configuration (default: that of the first run)."""
    folder = run_of_checkpoint(args.ckpt_path[0])
    source = args.config or folder
    if missing := next((path for path in args.ckpt_path if not Path(path).exists()), None):
        raise UserError(f"checkpoint '{missing}' does not exist")
    if source is None or (folder and args.config is None and not run_config(folder).is_file()):
        raise UserError(f"'{args.ckpt_path[0]}' is not in the folder of a run; give its configuration: --config CONFIG")
    config = read_config(source, {"data.num_workers": 0, "model.compile": False, "seed_everything": False})
    if args.images is not None:
        config = replace_options(config, {"data.predict_path": args.images})
    verb = "validate" if args.images is None else "predict"  # predict also accepts images of other classes
    own = [replace_options(config, {"ckpt_path": path}) for path in args.ckpt_path]
    runs = [Run.from_config(each, verb, quiet=True) for each in own]
    paths, data = [Path(run.config["ckpt_path"]) for run in runs], runs[0].data
    names = [path.stem for path in paths]
    for i, path in enumerate(paths):
        if (home := run_of_checkpoint(path)) is not None:
            names[i] = f"{home.parent.name}/{home.name}/{path.stem}"
    subjects = []
    for name, path, run in zip(names, paths, runs, strict=True):
        run.data = data
        task = run.trained()
        about = {
            "backbone": str(task.hparams["backbone"]),
            "attention": str(task.hparams["attention"] or "its own"),
            "weights": f"{shown(path)}{'' if task.average is None else ', moving average'}",
        }
        classes, name = class_names(task), name if names.count(name) == 1 else str(path)
        describe = partial(_describe, task)
        subjects.append(AnalysedModel(name, task.predicting, describe, classes, about, palette(len(classes))))
    return data, subjects


def _describe(task: Task, batch: dict[str, Any]) -> Description:
    return task.describe(batch, task.predict_batch(task.predicting, batch))


def _print(found: Sequence[Analysis]) -> None:
    index = STATISTICS.index("rank")
    for one in found:
        parts = [part for part in one.parts if part]
        ranks = [one.layers(part) for part in ("", *parts)]  # the whole matrix first
        rows = [("  layer", "rank", "tokens", *parts, "")]
        for layer in dict.fromkeys(layer for layer, *_ in one.rows):
            whole, *own = (f"{of_part[layer][index]:.1f}" if layer in of_part else "" for of_part in ranks)
            rows.append((f"  {layer}", whole, str(one.tokens[layer]), *own, ""))
        print("\n".join(["", one.subject.name, *table(rows)]))
        for what, reason in one.left_out.items():
            print(reflow(f"  left out: {what}: {reason}"))
