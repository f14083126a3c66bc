"""`linvit evaluate`: scores a classifier on several test sets, with calibration and costs, and writes a page."""

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from lightning.pytorch.utilities import rank_zero_warn

from linvit.data import ClassificationData
from linvit.errors import UserError, check_number
from linvit.evaluation.corruptions import CORRUPTIONS, SEVERITIES
from linvit.evaluation.model import TIMM, EvaluatedModel, read_model
from linvit.evaluation.report import corruption_tables, table_of, top1_by_set, write
from linvit.evaluation.scores import Evaluator
from linvit.evaluation.sets import ImageSet, read_set, real_labels
from linvit.io.files import check_writable
from linvit.io.plain_text import shown
from linvit.io.terminal import argument_parser, reflow, table
from linvit.runs import result
from linvit.runs.folder import RESULT, RunFolder, check_finished, run_of_checkpoint
from linvit.runs.options import read_config
from linvit.runs.run import Run
from linvit.runs.trainer import usable_accelerator

EPILOG = """sets:
  clean=FOLDER    images for comparison (default: the test images of
                  a run)
  real=FILE       ReaL's labels of the clean images: a JSON list of lists
  v2=FOLDER sketch=FOLDER a=FOLDER r=FOLDER, or any NAME=FOLDER
                  folders named by classes or their numbers; if classes
                  are missing, their logits are left out, and the clean
                  score on the same classes is shown as well
  objectnet=FOLDER,FILE
                  with a JSON object: folder to classes, by name or number
  c=FOLDER c_extra=FOLDER
                  ImageNet-C's 15 corruptions and the 4 others, in
                  FOLDER/CORRUPTION/SEVERITY, such as FOLDER/fog/3

examples:
  linvit evaluate RUN --sizes 32 48 64
  linvit evaluate model.onnx --sets clean=imagenet/val real=real.json
  linvit evaluate timm:deit_tiny_patch16_224 --sets clean=imagenet/val \\
    a=imagenet-a r=imagenet-r c=imagenet-c --devices 8

Only timm's weights are downloaded. A .pt2 is a program: only use trusted files.
"""


def main(argv: list[str]) -> int:
    """Runs `linvit evaluate`; prints a table and the path of the page, and returns 0."""
    parser = argument_parser("linvit evaluate", __doc__, EPILOG)
    parser.add_argument("model", metavar="MODEL", help="a run, a checkpoint, NAME.onnx, NAME.pt2, or timm:NAME")
    parser.add_argument("--sets", nargs="+", default=[], metavar="SET", help="NAME or NAME=PATH; see below")
    parser.add_argument("--sizes", nargs="+", type=int, default=[], metavar="N", help="the clean set at other sizes")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--num_workers", type=int, default=2, metavar="N", help="loader processes per device")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="output folder (default: RUN/evaluation)")
    args = parser.parse_args(argv)
    for name, least in (("batch_size", 1), ("num_workers", 0), ("devices", 1)):
        check_number(f"--{name}", getattr(args, name), at_least=least)
    given = dict(read_spec(text) for text in args.sets)
    folder = args.output or Path(run_of_checkpoint(args.model) or "", "evaluation")
    check_writable(folder, "--output")
    if not args.model.startswith(TIMM):
        check_finished(Path(args.model), "evaluate")
    fabric = Fabric(accelerator=usable_accelerator(), devices=args.devices)
    model = read_model(args.model, fabric.device)
    clean, others = read_sets(model, given, args.model)
    fabric.launch()
    scores = Evaluator(model, fabric, args.batch_size, args.num_workers)(clean, others, args.sizes)
    if fabric.is_global_zero:
        print("\n".join(table(table_of(scores, model))))
        for _, said in corruption_tables(scores, model).values():
            print(reflow(said))
        print(shown(write(scores, model, others, args.model, shlex.join(["linvit", "evaluate", *argv]), folder)))
        run = run_of_checkpoint(args.model)
        if run is not None and (run / RESULT).exists() and RunFolder(run).is_best(args.model):
            record, named = result.read(run / RESULT), scores
            if other := given.get("clean"):  # not the run's own images
                name, of = other[0].resolve().name, ("clean", "real")
                named = [one._replace(set=f"{one.set} of {name}") if one.set in of else one for one in scores]
            result.write(run / RESULT, record | {"evaluation": record["evaluation"] | top1_by_set(named, model)})
    return 0


def read_spec(text: str) -> tuple[str, list[Path]]:
    """Parses NAME, NAME=PATH, or NAME=PATH,FILE."""
    name, _, paths = text.partition("=")
    if not paths:
        raise UserError(f"'--sets {text}' has no path: write {name}=FOLDER")
    if name == "objectnet" and "," not in paths:
        raise UserError("ObjectNet's folders need a file that says which classes they are: objectnet=FOLDER,FILE")
    return name, [Path(path) for path in paths.split(",") if path]


def read_sets(model: EvaluatedModel, given: dict[str, list[Path]], name: str) -> tuple[list[ImageSet], list[ImageSet]]:
    """Reads the clean set, also with ReaL's labels, and the other sets, without their images."""
    if model.preprocessing.patch_size is not None:
        raise UserError(
            "linvit evaluate compares images of one size, and this network takes them at their own; score it "
            "with linvit test"
        )
    run = None if name.startswith(TIMM) else run_of_checkpoint(name)
    plain = {each: paths for each, paths in given.items() if each != "real" and each not in CORRUPTIONS}
    sets = {each: read_folder(each, model, paths) for each, paths in plain.items()}
    named = [each for each in CORRUPTIONS if each in given]
    corrupted = [own for each in named for own in read_corrupted(each, model, given[each][0])]
    if run is not None and "clean" not in sets:
        data = Run.from_config(read_config(run), "test", quiet=True).data
        if isinstance(data, ClassificationData):
            sets["clean"] = read_set("clean", data, model.classes, whole=False)
    clean = sets.pop("clean", None)
    if clean is None and ("real" in given or not (sets or corrupted)):
        raise UserError(f"'{name}' has no test images: add --sets clean=FOLDER")
    views = [] if clean is None else [clean]
    if clean is not None and "real" in given:
        every = range(len(model.classes))
        labels = real_labels(given["real"][0], clean, len(every))
        views.append(clean._replace(name="real", answers=labels, classes=every))
    return views, [*sets.values(), *corrupted]


def read_corrupted(name: str, model: EvaluatedModel, folder: Path) -> list[ImageSet]:
    """Returns the sets of each corruption and severity in a folder; warns about missing corruptions."""
    places = {each: [folder / each / str(severity) for severity in SEVERITIES] for each in CORRUPTIONS[name]}
    there = [each for each, own in places.items() if all(place.is_dir() for place in own)]
    missing = [each for each in places if each not in there]
    if not there:
        raise UserError(f"'{folder}' has no corruption of {name}: expected folders such as '{places[missing[0]][0]}'")
    if missing:
        rank_zero_warn(f"left out of {name}, since a severity of 1 to 5 is missing in '{folder}': {', '.join(missing)}")
    return [
        read_folder(name, model, [place])._replace(kind=(each, severity))
        for each in there
        for severity, place in zip(SEVERITIES, places[each], strict=True)
    ]


def read_folder(name: str, model: EvaluatedModel, paths: Sequence[Path]) -> ImageSet:
    """Returns the images of a folder or table, prepared as for the network, and a file that maps its classes."""
    not_data = {"size", "resize_limits", "multiple", "patch_size", "max_tokens"}
    names = {each.name for each in fields(model.preprocessing)} - not_data
    options: Any = {name: getattr(model.preprocessing, name) for name in names}
    data = ClassificationData(str(paths[0]), img_size=model.preprocessing.size or 0, **options)
    return read_set(name, data, model.classes, paths[1] if paths[1:] else None)
