"""`linvit linearize`: trains a copy of a trained network with another attention, and says what it cost and gained."""

import gc
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from linvit.cli.spec import read_value, timm_images
from linvit.errors import UserError
from linvit.files import LAST, rewriting
from linvit.runs.configs import of_stage, split_configs
from linvit.signals import STOP
from linvit.terminal import argument_parser

if TYPE_CHECKING:
    from linvit.tasks import Teacher

EPILOG = """examples:
  linvit linearize --config linearize/quickstart
  linvit linearize --teacher RUN --model.attention='[focused, null, focused]'
  linvit linearize --teacher RUN --model.attention=linear --keep 2
  linvit linearize --config mine.yaml --model.attention=mlla \\
    --teacher timm:vit_small_patch14_dinov2

All options of linvit fit are taken. The student starts from all weights of its
teacher, and learns from the labels and from the attention of its teacher; null
in a list keeps a block's softmax. What is matched, and how much it counts:
  --model.teacher.attention_weight=50     outputs of attention, mean over blocks
  --model.teacher.block_weight=0          outputs of blocks
  --model.teacher.feature_weight=0        the last features
  --model.teacher.logit_weight=0          the logits
  --model.teacher.task_weight=1           the task's own loss; 0 needs no labels
Stages (stages: in a configuration) are runs that start from one another's last
weights, all but the last in folders stage_1, stage_2, ...; each is a mapping of
options, such as
  {trainer.max_epochs: 4, model.teacher.attention_inputs: teacher,
   model.teacher.task_weight: 0}
and --resume=auto continues the stage that was interrupted. A model of timm
without --config is learned from images alone, of any folder; without a network,
its weights come from a file:
  linvit linearize --teacher FILE --model.attention=linear \\
    --model.backbone='{name: timm, model: MODEL}' --data.source=IMAGES
The run's folder gets a page, linearize.html.
"""
OF_A_RUN = "base/linearize"
ALONE = "linearize/features"  # of a teacher that is no run, and no data: its features, of images without labels


def main(argv: list[str]) -> int:
    """Runs `linvit linearize`; returns 0."""
    parser = argument_parser("linvit linearize", __doc__, EPILOG)
    parser.allow_abbrev = False  # the other options are those of fit
    teacher = "a run's folder, one of its checkpoints, a file of weights, hf-hub:OWNER/NAME, or timm:MODEL"
    parser.add_argument("--teacher", metavar="WHAT", help=teacher)
    parser.add_argument("--copy", metavar="WHAT", help="weights to start from: all, attention, mlp (all else), nothing")
    parser.add_argument("--no_page", action="store_true", help="train alone; measure and write no page")
    keep = "keep the softmax of N blocks, which are found before training by converting next what costs least"
    parser.add_argument("--keep", type=int, metavar="N", help=keep)
    parser.add_argument("--resume", choices=["auto"], help="auto continues the newest run of this command")
    args, options = parser.parse_known_args(argv)
    options = with_teacher(args.teacher, options)
    options += [f"--model.teacher.copied={args.copy}"] * (args.copy is not None)

    from torch.distributed import destroy_process_group, is_initialized

    from linvit.experiments.linearize import PAGE, write_page
    from linvit.runs.library_messages import hide_library_messages
    from linvit.runs.run import Run
    from linvit.runs.train_teacher import train_teacher

    hide_library_messages()
    with STOP.caught():
        run, table = Run.read(["fit", *options]), None
        plan = run.settings
        stages = plan.stages or [{}]
        root = Path(plan.trainer.default_root_dir or "checkpoints")
        places = [*(root / f"stage_{number}" for number in range(1, len(stages))), root]
        if plan.ckpt_path and plan.stages:
            raise UserError("--ckpt_path names one run, and stages are several: --resume=auto continues them")
        teachers: list[Teacher] = []
        for stage in stages:  # wrong options end it before anything is trained
            run = Run.read(["fit", *of_stage(stage, options)]) if plan.stages else run
            if run.task.teacher is None:
                raise UserError("name the trained network that becomes linear: --teacher RUN, or model.teacher.source")
            teachers.append(run.task.teacher)
        trained = [train_teacher(teacher) for teacher in teachers]
        for stage in stages if plan.stages or any(trained) else []:
            run = Run.read(["fit", *of_stage(stage, options)])
            run.task.load_teacher()  # one that does not fit a later stage ends it before the first
            run.task.teardown("fit")
        if args.keep is not None:
            from linvit.experiments.keep import TABLE, find_kept

            blocks, table = find_kept(run, args.keep)
            options.append(f"--model.attention={json.dumps(blocks)}")
        again = shlex.join(["linvit", "linearize", *argv, *["--resume=auto"] * (args.resume is None)])
        folders: list[Path] = []
        for stage, place in zip(stages, places, strict=True):
            here = [f"--trainer.default_root_dir={place}", *[f"--resume={args.resume}"] * bool(args.resume)]
            if folders and not run.trainer.fast_dev_run:  # type: ignore[attr-defined]
                averaged = run.task.hparams["predict_with"] == "ema"
                before = {"source": f"{folders[-1]}/checkpoints/{LAST}", "ema": averaged}
                here += [f"--model.pretrained={json.dumps(before)}", "--model.teacher.copied=nothing"]
            run = Run.read(["fit", *of_stage(stage, options), *here])
            run.resume_with = again
            gc.collect()  # a trainer and its network, of the stage before, refer to one another
            run.start()
            folders.append(Path(str(run.trainer.log_dir)))  # which all ranks ask for
            if not run.finished:
                args.resume = None  # what follows upon other weights is another run
        if is_initialized():
            destroy_process_group()  # one rank measures
        saved = run.trainer.loggers and not run.trainer.fast_dev_run  # type: ignore[attr-defined]
        if run.trainer.is_global_zero and saved:
            if table is not None:
                with rewriting(folders[-1] / TABLE) as part:
                    shutil.copyfile(table, part)
            page = folders[-1] / PAGE
            if not args.no_page:
                if args.resume is None or not page.exists():  # else all was finished
                    write_page(run, shlex.join(["linvit", "linearize", *argv]), folders)
                print(f"what came of it: {page}")
    return 0


def with_teacher(teacher: str | None, options: Sequence[str]) -> list[str]:
    """Options of `linvit fit` with a teacher, which wins over what configurations say: its run, or its backbone."""
    named = {option.partition("=")[0] for option in options}
    configs, others = split_configs(options)
    if teacher is None:
        if not configs:
            raise UserError("name the trained network that becomes linear, --teacher RUN, or a --config")
        return [*options]
    if teacher.startswith("timm:"):
        name = teacher.removeprefix("timm:")
        own = [f"--model.backbone={{name: timm, model: {name}, pretrained: true}}", "--model.teacher.source=null"]
        if configs:
            return [*configs, *own, *others]
        return ["--config", ALONE, *prepared(name), *own, *others]
    from linvit.runs.folder import RunFolder, run_config, run_of_checkpoint, saved

    path = Path(teacher)
    folder = run_of_checkpoint(path) if path.exists() else None
    source = f"--model.teacher.source={teacher}"
    if folder is None and configs:
        return [*configs, source, *others]
    if folder is None:
        model = timm_model(others)
        if model is None:
            raise UserError(
                f"'{teacher}' is neither the folder of a run nor a checkpoint in one. Weights alone do not say of "
                f"which network they are. Add a --config of it, or name a model of timm, which learns from images "
                f"without labels: --model.backbone='{{name: timm, model: MODEL}}' --model.attention=linear "
                f"--data.source=IMAGES"
            )
        return ["--config", ALONE, *prepared(model), source, *others]
    if not configs and "--model.attention" not in named:
        raise UserError("which attention shall take the place of the teacher's? Such as --model.attention=focused")
    averaged = ["--model.mesa=0"] * bool(RunFolder(folder).model.get("mesa"))  # with an average that a student has not
    config = run_config(folder).resolve()  # which the user may have named, too
    first = str(config) if config in [Path(option).resolve() for option in configs] else saved(folder)
    return ["--config", first, "--config", OF_A_RUN, *configs, source, *averaged, *others]


def timm_model(options: Sequence[str]) -> str | None:
    """Returns the name of the model of timm that options name as the backbone, or None."""
    model = None
    for option, following in zip(options, [*options[1:], ""], strict=True):
        name, given, value = option.partition("=")
        if name == "--model.backbone":
            spec = read_value(name, value if given else following)
            model = str(spec.get("model")) if isinstance(spec, Mapping) and spec.get("name") == "timm" else None
    return model


def prepared(model: str) -> list[str]:
    """Returns the options that normalise images as a model of timm takes them."""
    return [f"--data.{part}={value}" for part, value in timm_images(model).items() if part in ("mean", "std")]
