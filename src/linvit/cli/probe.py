"""`linvit probe`: accuracies of nearest neighbours and linear classifiers on the frozen features of each layer."""

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm.models
import torch

from linvit.data import ClassificationData
from linvit.errors import UserError, check_number
from linvit.experiments.probe import Protocol, Score, Subject, in_words, probe, table_of, write
from linvit.runs.folder import check_writable, run_config, run_of_checkpoint, shown
from linvit.runs.run import Run
from linvit.tasks.pretrained import skip_pretrained
from linvit.terminal import argument_parser, reflow, table

EPILOG = """examples:
  linvit probe RUN            on the images that the run was trained on
  linvit probe TEACHER STUDENT --random
                              several side by side, and one not trained
  linvit probe timm:vit_small_patch16_dinov3 --data.source=path/to/folder
  linvit probe --config mine.yaml --model.pretrained=FILE
                              a backbone with weights of a file

Options of linvit validate say which images (--data.source=FOLDER) and how they
are prepared; what they leave open, the configuration of a run says, or timm of
its models. The run's folder, or ./probe, gets index.html, with the scores over
depth, probe.md and probe.csv. All features are kept in memory: --layers=-1 takes
those of the last layer alone.
"""
DEFAULTS = Protocol()


def main(argv: list[str]) -> int:
    """Runs `linvit probe`; prints a table and where the page is, and returns 0.

    Raises:
        UserError: If a network cannot be built or has no such layers, or the images have no labels.
    """
    parser = argument_parser("linvit probe", __doc__, EPILOG)
    parser.allow_abbrev = False  # the other options are those of validate
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="a run, one of its checkpoints, or timm:MODEL")
    parser.add_argument("--random", action="store_true", help="also the first network with random weights")
    parser.add_argument("--layers", nargs="+", type=int, metavar="N", help="blocks or stages: 0, 1, ... or -1, -2, ...")
    parser.add_argument(
        "--neighbours", nargs="+", type=int, metavar="K", default=DEFAULTS.neighbours, help="of kNN (default: 10 20)"
    )
    parser.add_argument(
        "--lrs", nargs="+", type=float, metavar="LR", default=DEFAULTS.lrs, help="grid (default: 0.001 to 10)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=DEFAULTS.epochs, help="(default: %(default)s)")
    parser.add_argument("--config", metavar="CONFIG", help="of the images, and of a network that is named nowhere else")
    parser.add_argument("--output", type=Path, metavar="DIR", help="to write to (default: RUN/probe, or probe)")
    args, options = parser.parse_known_args(argv)
    check_number("--epochs", args.epochs, at_least=1)
    for lr in args.lrs:
        check_number("--lrs", lr, above=0)
    protocol = Protocol(args.layers, args.neighbours, args.lrs, args.epochs)
    options = [*(["--config", args.config] if args.config else []), *options, "--model.compile=false"]
    runs = [folder for name in args.networks if (folder := run_of_checkpoint(name)) is not None]
    folder = args.output or Path(*runs[:1], "probe")
    check_writable(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = args.networks or [None]
    scores: list[Score] = []
    sources: dict[str, str] = {}
    for name, trained in [*[(names[0], False)] * args.random, *((name, True) for name in names)]:
        subject = read_subject(name, options, trained)
        found, images = probe(subject, protocol, device)
        scores += found
        sources[subject.data.source] = images
        if len(sources) > 1:
            raise UserError(
                f"these networks have images of their own, {', '.join(sources)}: name some for all, "
                "--data.source=SOURCE"
            )
    (about,) = (f"Images of {source}: {images}, the last of which is tested." for source, images in sources.items())
    about = f"{about} {in_words(protocol)}"
    print("\n".join(table(table_of(scores, protocol))))
    print(reflow(about))
    print(shown(write(scores, protocol, about, shlex.join(["linvit", "probe", *argv]), folder)))
    return 0


def read_subject(name: str | None, options: Sequence[str], trained: bool) -> Subject:
    """A network and its images.

    Args:
        name: A run, a checkpoint, or timm:MODEL; None is the network that the options describe.
        options: Those of `linvit validate`.
        trained: Whether it has its weights, or random ones.

    Raises:
        UserError: If there is no such network, or no images with a class each.
    """
    folder, own = None, []
    if name is not None and name.startswith("timm:"):
        own = of_timm(name.removeprefix("timm:"))
    elif name is not None:
        folder = run_of_checkpoint(name) if Path(name).exists() else None
        if folder is None:
            raise UserError(
                f"'{name}' is neither a run, NAME/version_N, nor a checkpoint in one, nor timm:MODEL; a value of an "
                f"option follows a =, as in --data.source=FOLDER"
            )
        own = ["--config", str(run_config(folder)), f"--ckpt_path={name}"]
    run = Run("predict", [*own, *options], quiet=True)
    if not isinstance(run.data, ClassificationData):
        raise UserError(
            f"probes need images with one class each, and these are of {type(run.data).__name__}: name others, "
            f"--data=linvit.data.ClassificationData --data.source=SOURCE"
        )
    with nullcontext() if trained else skip_pretrained():
        task = run.trained() if trained and folder is not None else run.task
    network = task.network if task.average is None else task.average.network
    title = name or str(task.hparams["backbone"])
    if folder is not None:
        title = f"{folder.parent.name}/{folder.name}/{Path(run.settings.ckpt_path).stem}"
    return Subject(title if trained else f"{title}, random", network, run.data)


def of_timm(model: str) -> list[str]:
    """The options that describe a trained model of timm, and images as it takes them."""
    options = [
        "--model=linvit.tasks.ClassificationTask",
        f"--model.backbone={{name: timm, model: {model}, pretrained: true}}",
    ]
    options.append("--data=linvit.data.ClassificationData")
    config: Any = timm.models.get_pretrained_cfg(model)
    if config is not None:
        options += [f"--data.{name}={list(getattr(config, name))}" for name in ("mean", "std")]
        options += [f"--data.img_size={list(config.input_size[1:])}", f"--data.crop_pct={config.crop_pct}"]
    return options
