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
from linvit.experiments.probe import ProbedModel, ProbeScore, Protocol, in_words, probe, table_of, write
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
depth, probe.md and probe.csv. All features are kept in memory; --layers=-1 are
those of the last layer alone.
"""
DEFAULTS = Protocol()


def main(argv: list[str]) -> int:
    """Runs `linvit probe`; prints a table and where the page is, and returns 0."""
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
    # argparse would take an option with a space in it for a network
    options = [option for option in argv if option.startswith(("--data", "--model"))]
    args, others = parser.parse_known_args([option for option in argv if option not in options])
    check_number("--epochs", args.epochs, at_least=1)
    for lr in args.lrs:
        check_number("--lrs", lr, above=0)
    protocol = Protocol(args.layers, args.neighbours, args.lrs, args.epochs)
    folder = args.output or Path(*[run_of_checkpoint(name) or "" for name in args.networks[:1]], "probe")
    check_writable(folder)
    options = [*others, *options, "--model.compile=false"]
    names = args.networks or [None]
    wanted = [*[(names[0], False)] * args.random, *((name, True) for name in names)]
    subjects = [read_subject(name, args.config, options, trained) for name, trained in wanted]
    if len(sources := {subject.data.source: None for subject in subjects}) > 1:
        raise UserError(f"these networks have images of their own, {', '.join(sources)}: choose, --data.source=SOURCE")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores: list[ProbeScore] = []
    for subject in subjects:
        found, images = probe(subject, protocol, device)
        scores += found
    about = f"Images of {', '.join(sources)}: {images}, the last of which is tested. {in_words(protocol)}"
    titles, *rows = table_of(scores, protocol)
    for name in dict.fromkeys(name for name, *_ in rows):
        own = [titles, *(row for row in rows if row[0] == name)]
        print("\n".join([name, *table([("", *row[1:], "") for row in own]), ""]))
    print(reflow(about))
    print(shown(write(scores, protocol, about, shlex.join(["linvit", "probe", *argv]), folder)))
    return 0


def read_subject(name: str | None, config: str | None, options: Sequence[str], trained: bool) -> ProbedModel:
    """A network and its images.

    The name is that of a run, a checkpoint, or timm:MODEL; None is the network that configuration and options, those of
    `linvit validate`, describe. One that is not `trained` has random weights.
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
    run = Run("predict", [*own, *(["--config", config] if config else []), *options], quiet=True)
    if not isinstance(run.data, ClassificationData):  # of a dense task, whose backbone is probed
        data = run.data
        if not any(option.startswith("--data.source=") for option in options):
            raise UserError(
                f"probes need images with one class each, and '{data.source}' is for {type(data).__name__}: name "
                f"others, --data.source=FOLDER"
            )
        own = classification(img_size=list(data.size), mean=list(data.mean), std=list(data.std))
        run.data = Run("predict", [*own, *options], quiet=True).data
    with nullcontext() if trained else skip_pretrained():
        task = run.trained() if trained and folder is not None else run.task
    return ProbedModel((name or str(task.hparams["backbone"])) + ", random" * (not trained), task.predicting, run.data)


def of_timm(model: str) -> list[str]:
    """The options that describe a trained model of timm, and images as it takes them."""
    config: Any = timm.models.get_pretrained_cfg(model)
    known = {} if config is None else {"img_size": list(config.input_size[1:]), "crop_pct": config.crop_pct}
    known |= {} if config is None else {"mean": list(config.mean), "std": list(config.std)}
    return [*classification(**known), f"--model.backbone={{name: timm, model: {model}, pretrained: true}}"]


def classification(**data: Any) -> list[str]:
    """The options that describe labelled images."""
    classes = ["--model=linvit.tasks.ClassificationTask", "--data=linvit.data.ClassificationData"]
    return [*classes, *(f"--data.{name}={value}" for name, value in data.items())]
