"""`linvit linearize`: trains a copy of a trained network with another attention, and reports costs and gains."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linvit.cli.options import RESUME_AND_CHECKPOINT
from linvit.cli.spec import read_value
from linvit.errors import UserError, check_number
from linvit.io.files import CHECKPOINTS, LAST
from linvit.io.plain_text import shown
from linvit.io.signals import STOP
from linvit.io.terminal import argument_parser

if TYPE_CHECKING:
    from linvit.backbones.trained import TrainedBackbone
    from linvit.runs.parser import Config
    from linvit.runs.run import Run

EPILOG = """examples:
  linvit linearize --config linearize/quickstart
  linvit linearize --teacher RUN --model.attention='[focused, null, focused]'
  linvit linearize --teacher RUN --model.attention=linear --budget softmax=2
  linvit linearize --teacher RUN --budget latency=0.6 \\
    --choices '[{name: window, window_size: 7}, hedgehog]'
  linvit linearize --config mine.yaml --model.attention=efficient \\
    --teacher timm:vit_small_patch14_dinov2

All options of linvit fit are accepted. The student starts from all weights of
its teacher, and learns from the labels and from the teacher's attention; null
in a list keeps a block's softmax. Losses and their weights:
  --model.teacher.attention_weight=50     outputs of attention, mean over blocks
  --model.teacher.block_weight=0          outputs of blocks
  --model.teacher.feature_weight=0        the last features
  --model.teacher.logit_weight=0          the logits
  --model.teacher.task_weight=1           the task's own loss; 0 needs no labels
A budget finds a hybrid before training. latency=0.6 is 60 % of the teacher's
time for one image, on this device; macs=0.6 of its MACs; @518 adds the side of
the image; softmax=2 keeps two blocks. Each choice learns the attention of all
blocks for --search_steps; then hybrids are compared by the distance of their
last features to the teacher's. An interrupted search is resumed.
Stages (stages: in a configuration) are runs that each start from the previous
run's last weights, all but the last in folders stage_1, stage_2, ...; each is
a mapping of options, such as
  {trainer.max_epochs: 4, model.teacher.attention_inputs: teacher,
   model.teacher.task_weight: 0}
and --resume=auto resumes the stage that was interrupted. A model of timm
or transformers (hf:FOLDER, hf:OWNER/MODEL) without --config is trained on
images alone, from any folder; without internet, timm's weights come from a
file, of DINOv2-S or of another --model.backbone:
  linvit linearize --teacher FILE --model.attention=linear --data.source=IMAGES
The run's folder gets a page, linearize.html.
"""
STUDENT = "student"  # folder of a student of transformers, in the folder of its run
OF_A_RUN = "base/linearize"
ALONE = "linearize/features"  # for a teacher that is not a run, without data: its features, on images without labels


def main(argv: list[str]) -> int:
    """Runs `linvit linearize`; returns 0."""
    parser = argument_parser("linvit linearize", __doc__, EPILOG)
    parser.allow_abbrev = False  # the other options are those of fit
    teacher = "a run's folder, one of its checkpoints, a file of weights, hf-hub:OWNER/NAME, timm:MODEL, or hf:FOLDER"
    parser.add_argument("--teacher", metavar="WHAT", help=teacher)
    parser.add_argument("--copy", metavar="WHAT", help="weights to copy: all, attention, mlp (all others), nothing")
    parser.add_argument("--no_page", action="store_true", help="only train; do not measure and write the page")
    budget = "search a hybrid: latency=SHARE or macs=SHARE of the teacher, or softmax=BLOCKS"
    parser.add_argument("--budget", help=budget)
    listed = "list of attentions to choose from in a search (windows and --model.attention)"
    parser.add_argument("--choices", metavar="LIST", help=listed)
    steps = "training steps of each choice in a search (%(default)s)"
    parser.add_argument("--search_steps", type=int, default=100, help=steps)
    parser.add_argument("--resume", choices=["auto"], help="auto resumes the newest run of this command")
    args, options = parser.parse_known_args(argv)

    from torch.distributed import destroy_process_group, is_initialized

    from linvit.experiments.hybrids.run import check_attention, find_hybrid
    from linvit.experiments.linearize import PAGE, write_page
    from linvit.runs.library_messages import hide_library_messages
    from linvit.runs.options import replace_options
    from linvit.runs.stages import check_stages, fit_stages

    hide_library_messages()
    with STOP.caught():
        if args.resume is not None and any(option.partition("=")[0] == "--ckpt_path" for option in options):
            raise UserError(RESUME_AND_CHECKPOINT)
        choices = read_choices(args)
        options += [] if choices is None else [f"--model.attention={json.dumps(choices[-1])}"]
        config = with_teacher(args.teacher, options)
        if args.copy is not None:
            config = replace_options(config, {"model.teacher.copied": args.copy})
        if args.budget is not None:
            check_attention(config["model"]["init_args"].get("attention"))
        run, search = check_stages(config), None
        if args.budget is not None:
            specs, search = find_hybrid(run, args.budget, choices, args.search_steps)
            config = replace_options(config, {"model.attention": specs})
        command = shlex.join(["linvit", "linearize", *argv])
        again = command + " --resume=auto" * (args.resume is None)
        run, folders = fit_stages(config, args.resume, command, again)
        if is_initialized():
            destroy_process_group()  # one rank measures
        saved = run.trainer.loggers and not run.trainer.fast_dev_run  # type: ignore[attr-defined]
        if run.trainer.is_global_zero and saved:
            page = folders[-1] / PAGE
            if not args.no_page:
                if not run.finished or not page.exists():  # of an earlier command
                    write_page(run, command, folders, search)
                print(f"results: {shown(page)}")
            save_student(run, folders[-1])
    return 0


def read_choices(args: argparse.Namespace) -> list[Any] | None:
    """Returns the list of --choices; rejects wrong options of a search, before a teacher is trained."""
    from linvit.experiments.hybrids.costs import Budget
    from linvit.registry import attentions

    choices = None if args.choices is None else read_value("--choices", args.choices)
    if choices is not None and (args.budget is None or not choices or not isinstance(choices, list)):
        raise UserError(
            f"--choices is a list of attentions for a search, such as --budget latency=0.6 --choices '[window, "
            f"hedgehog]'; got --choices={args.choices}" + " without --budget" * (args.budget is None)
        )
    if args.budget is not None:
        Budget.read(args.budget)
        check_number("--search_steps", args.search_steps, at_least=0, whole=True)
        for spec in choices or []:
            attentions.get(attentions.parse(spec)[0])
    return choices


def save_student(run: "Run", folder: Path) -> None:
    """Writes a student of transformers for `linvit.load_transformers`: the run's best, or its last without scores."""
    from linvit.inference.model import load
    from linvit.runs.folder import best_checkpoints

    if hasattr(getattr(run.task.network, "backbone", run.task.network), "save_pretrained"):
        names = best_checkpoints(run.task.hparams["predict_with"])
        scored = any((folder / CHECKPOINTS / name).exists() for name in names)
        network: Any = load(folder if scored else folder / CHECKPOINTS / LAST).network
        getattr(network, "backbone", network).save_pretrained(folder / STUDENT)
        print(f"for linvit.load_transformers: {shown(folder / STUDENT)}")


def with_teacher(teacher: str | None, options: Sequence[str]) -> "Config":
    """Returns the configuration of `linvit fit` options with a teacher, which overrides that of configurations.

    The teacher is a run, or the backbone itself. Options of the command line replace those of stages.
    """
    from linvit.backbones.trained import trained_backbone
    from linvit.cli.options import arguments, configs, read_options
    from linvit.runs.folder import RunFolder, run_config, run_of_checkpoint
    from linvit.runs.options import Source, read_config, without_stage_options
    from linvit.runs.saved_config import saved_config

    sources = configs(options)
    others = [argument for argument, config in arguments(options) if config is None]
    named = {option.partition("=")[0].removeprefix("--") for option in others}
    parts: list[Source] = [*sources]
    own = dict[str, Any]()
    if teacher is None and not sources:
        raise UserError("give the trained network to linearize, --teacher RUN, or a --config")
    if teacher is not None and (model := trained_backbone(teacher)) is not None:
        own = {"model.backbone": model.spec, "model.teacher.source": None}
        if not sources:
            parts, own = [ALONE], own | prepared(model)
    elif teacher is not None:
        folder = run_of_checkpoint(teacher) if Path(teacher).exists() else None
        own = {"model.teacher.source": teacher}
        if folder is not None:
            if not sources and "model.attention" not in named:
                raise UserError("give the attention of the student, such as --model.attention=focused")
            if RunFolder(folder).model.get("mesa"):  # with a moving average, which a student lacks
                own["model.mesa"] = 0
            config = run_config(folder).resolve()  # which the user may also have given
            trusted = config in [Path(option).resolve() for option in sources]
            parts = [str(config) if trusted else saved_config(run_config(folder)), OF_A_RUN, *sources]
        elif not sources:
            name = timm_model(others)
            if name is None and not Path(teacher).is_file():
                raise UserError(
                    f"'{teacher}' is neither the folder of a run, nor a checkpoint in one, nor a file of weights. For "
                    f"other weights add a --config, or name their model of timm, which learns from images "
                    f"without labels: --model.backbone='{{name: timm, model: MODEL}}' --model.attention=linear "
                    f"--data.source=IMAGES"
                )
            if name is None:
                name = read_config(ALONE)["model"]["init_args"]["backbone"]["model"]
                own["model.backbone"] = {"name": "timm", "model": name}
            known = trained_backbone(f"timm:{name}")
            assert known is not None
            parts, own = [ALONE], own | prepared(known)
    return without_stage_options(read_options("fit", others, read_config(parts, own)), named)


def timm_model(options: Sequence[str]) -> str | None:
    """Returns the timm model in the option for the backbone, or None."""
    model = None
    for option, following in zip(options, [*options[1:], ""], strict=True):
        name, given, value = option.partition("=")
        if name == "--model.backbone":
            spec = read_value(name, value if given else following)
            model = str(spec.get("model")) if isinstance(spec, Mapping) and spec.get("name") == "timm" else None
    return model


def prepared(model: "TrainedBackbone") -> dict[str, Any]:
    """Returns the options for the image preparation of a model; for timm, only mean and std."""
    model.print_images()
    parts = ("mean", "std") if model.spec["name"] == "timm" else tuple(model.images)
    return {f"data.{part}": model.images[part] for part in parts if part in model.images}
