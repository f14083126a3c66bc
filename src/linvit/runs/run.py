"""A run: read from a command line, from its folder or from a checkpoint, and built when it is asked for."""

import shlex
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from linvit import yaml_text
from linvit.analysis.operations import count_on_meta
from linvit.callbacks.attention.measurement import AttentionRank
from linvit.callbacks.common import class_names
from linvit.callbacks.monitors import ImageCount
from linvit.callbacks.non_finite import NonFiniteGuard
from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.data.base import ImageData
from linvit.errors import UserError, check_number
from linvit.files import CHECKPOINTS, LAST, resume_command
from linvit.image_size import image_size
from linvit.plain_text import shown
from linvit.runs import result
from linvit.runs.checkpoint import Checkpoint, Found, SameCheckpoint, checkpoint_in, find, read_checkpoint
from linvit.runs.conditions import conditions
from linvit.runs.configs import SAVED, configs
from linvit.runs.endings import Ranks, in_words, run_summary, score_table, unsaved
from linvit.runs.folder import (
    CONFIG,
    RESULT,
    RunFolder,
    best_checkpoints,
    check_writable,
    flat,
    newest,
    run_config,
    run_name,
    run_of_checkpoint,
    run_of_config,
)
from linvit.runs.loggers import CsvLogger, RowCount, run_loggers
from linvit.runs.parser import CommandLine, TrainerOptions, build_task, instantiate
from linvit.runs.trainer import (
    SaveRunConfig,
    SyncBatchNorm,
    add_displays,
    as_list,
    check_monitors,
    check_nccl,
    check_processes,
    check_strategy,
    default_callbacks,
    default_precision,
    launcher_hint,
    usable_accelerator,
)
from linvit.signals import STOP
from linvit.tasks.base import SET_BY_DATA, Task
from linvit.tasks.pretrained import skip_pretrained
from linvit.tasks.teacher import Teacher, kept_attention

UNTRAINED = "--untrained"
NO_WEIGHTS = (
    "linvit {0} needs weights: those of a run, --ckpt_path {1}, or of a file, --model.pretrained=FILE. To use the "
    "random ones of a new model, say so: --untrained"
)


class Run:
    """A run, which is trained, scored or resumed. It is read at once; data, task and trainer are built on first use.

    `settings` is the complete configuration, as the parser has it; a checkpoint has decided the model.
    """

    checkpoint: Checkpoint | None = None  # that is resumed or scored
    folder: Path | None = None  # of the run that is
    resume_with: str | None = None  # command of another verb than fit that has started it, and resumes it
    finished = False  # whether `--resume=auto` has found a run that has nothing left to do
    _found: Found | None = None

    def __init__(self, verb: str, options: Sequence[str], *, quiet: bool = False) -> None:
        self.verb, self._given = verb, list(options)
        self.options = [option for option in options if option != UNTRAINED or verb == "fit"]
        self.configs = [config.removeprefix(SAVED) for config in configs(self.options)]
        line = CommandLine(verb, self.options, quiet=quiet)
        self.settings, self.parser = line.config, line.parser
        self._find_teacher()
        self._find_pretrained()
        self._named = self.settings.model.as_dict()  # as the user gave them
        if self.settings.resume:
            self._find()
        if self.checkpoint is None and self.settings.ckpt_path:
            best = best_checkpoints(self.settings.model.init_args.get("predict_with", "raw"))
            path = checkpoint_in(self.settings.ckpt_path, [LAST] if self._fits else best)
            self.settings.ckpt_path = str(path)
            self.checkpoint = Checkpoint(self.settings.ckpt_path, resumed=self._fits)
        if self.checkpoint is not None and not self.finished:
            done, most = self.checkpoint.epochs, self.settings.trainer.max_epochs
            if self._fits and most is not None and 0 <= most < done:
                raise UserError(f"checkpoint '{self.checkpoint.path}' has done {done} epochs, more than {most}")
            self.folder = self.folder or self.checkpoint.run
            self.checkpoint.decide(self.settings.model, self._fits, told=not quiet)

    @classmethod
    def read(cls, source: Sequence[str] | str | Path, verb: str = "fit") -> "Run":
        """The run of a command line, or of a folder or checkpoint that a run has left.

        Args:
            source: A command line, such as `["fit", "--config", "quickstart"]`; or the folder of a run, of which `fit`
                takes the last checkpoint and the other verbs the best; or one of its checkpoints.
            verb: What to do with a folder or checkpoint: fit, validate, test or predict.
        """
        if not isinstance(source, str | Path):
            return cls(source[0], source[1:])
        folder = run_of_checkpoint(source)
        if folder is None:
            raise UserError(f"'{source}' is neither the folder of a run, NAME/version_N, nor a checkpoint in one")
        return cls(verb, ["--config", str(run_config(folder)), f"--ckpt_path={source}"])

    @property
    def config(self) -> dict[str, Any]:
        """The complete configuration, as `--print_config` prints it."""
        text = self.parser.dump(self.settings, skip_unset=False, skip_validation=True)  # they were checked when read
        config: dict[str, Any] = yaml_text.load(text, "the configuration")
        return config

    @cached_property
    def data(self) -> ImageData:
        """The data module."""
        data: ImageData = instantiate(self.settings, data=ImageData).data
        return data

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The arguments of the task that the data sets; a checkpoint has its own, which must agree with the data."""
        data, names = self.data, [name for name in SET_BY_DATA if name in self.settings.model.init_args]
        if self.checkpoint is not None:
            same_classes, way = self.verb != "predict" and not data.subset, "" if self._fits else data.how_to_restrict
            return self.checkpoint.facts(names, data, same_classes, way)
        facts = {name: getattr(data, name) for name in names}
        if facts.get("num_classes", 0) is None:
            way = data.how_to_count or data.how_to_label
            raise UserError(
                f"the data does not say how many classes there are. To train, score or probe, {way}; to predict alone, "
                f"set --data.num_classes"
            )
        return facts | ({"class_names": list(facts["class_names"])} if facts.get("class_names") else {})

    @cached_property
    def task(self) -> Task:
        """The task, with what the data says of itself; refuses a checkpoint whose weights, loaded later, do not fit."""
        facts = self.facts
        with nullcontext() if self.checkpoint is None else self.checkpoint.building(self._named):
            task = build_task(self.settings.model, **facts)
        if self.checkpoint is not None:
            self.checkpoint.check_weights(task)
        if self.data.subset:
            if self._fits or self.checkpoint is None:
                raise UserError("--data.classes=subset is for scores of a trained network: linvit test --ckpt_path RUN")
            self.data.restrict_to(class_names(task))
        return task

    def trained(self) -> Task:
        """The task with the weights of the checkpoint, in evaluation mode."""
        content = read_checkpoint(self.settings.ckpt_path)
        self.task.on_load_checkpoint(content)
        self.task.load_state_dict(content["state_dict"])
        return self.task.eval()

    @cached_property
    def trainer(self) -> Trainer:
        """The trainer, with the callbacks and loggers of the run; data and task are built before it."""
        self._check()
        try:
            return self._trainer(self.data, self.task)
        except MisconfigurationException as error:
            raise UserError(f"these options do not go together or do not exist: {error}") from error

    def start(self) -> None:
        """Does what its verb says, unless `--resume=auto` has found nothing left to do; says in words what ends it."""
        if not self.finished:
            self._run()
        elif self.folder is not None and not RunFolder(self.folder).complete:  # a kill came before it was written
            self._record(self.folder)

    def _run(self) -> None:
        names = ("ckpt_path", "weights_only", "verbose", "return_predictions")
        trainer, given = self.trainer, {name: self.settings[name] for name in names if name in self.settings}
        with in_words(trainer, self._ranks):
            getattr(trainer, self.verb)(self.task, datamodule=self.data, **given)
            if self._fits:
                self._say_how_it_went()
            elif self.verb != "predict" and trainer.is_global_zero:
                scores = {tag: value.item() for tag, value in trainer.callback_metrics.items()}
                every: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
                (counter,) = (callback for callback in every if isinstance(callback, ImageCount))
                images, published = f"{counter.images} images", self.task.published()
                if self.data.subset:
                    among = len(class_names(self.task))
                    images += f" of {self.data.num_classes} of the {among} classes; logits of the others are left out"
                    published = None
                print(score_table(scores, images, published))
                if self.verb == "test" and self.folder is not None and (self.folder / RESULT).exists():
                    run, checkpoint = RunFolder(self.folder), self.settings.ckpt_path
                    own = ("data.", *(f"model.{name}" for name in self.task.evaluation_options))
                    options = {name: value for name, value in flat(self.config).items() if name.startswith(own)}
                    state = self.checkpoint.saved if self.checkpoint else None
                    result.add_test(run, checkpoint, state, options, self.data, scores, counter.images)

    def _say_how_it_went(self) -> None:
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]  # nothing is kept
            return
        trainer, run = self.trainer, Path(str(self.trainer.log_dir))  # which all ranks ask for
        early = trainer.early_stopping_callbacks
        timers = [one for one in trainer.callbacks if isinstance(one, Timer)]  # type: ignore[attr-defined]
        ended_by = {
            "max_epochs=MORE": trainer.current_epoch == trainer.max_epochs,
            "max_steps=MORE": trainer.global_step == trainer.max_steps,
            "callbacks=WITHOUT_EARLY_STOPPING": any(one.stopped_epoch or one.stopping_reason_message for one in early),
            "max_time=MORE": self.settings.trainer.max_time and any((one.time_remaining() or 1) <= 0 for one in timers),
        }
        changes = [option for option, ended in ended_by.items() if ended] or ["max_epochs=MORE"]
        for saves in self.trainer.checkpoint_callbacks:
            if isinstance(saves, SaveCheckpoints):
                rank_zero_info(run_summary(saves, self.task.hparams["predict_with"], run, changes))
        self._record(run)
        if missing := unsaved(self.trainer):
            raise UserError(missing)

    def _record(self, folder: Path) -> None:
        """Writes the record of a run that has ended. What cannot be found out is left empty: the run has not failed."""
        if not self.trainer.is_global_zero:
            return
        if not folder.is_dir():
            raise UserError(
                f"'{folder}' was renamed or deleted before its {RESULT} was written. Give it back its name, then write "
                f"it with\n  {resume_command(folder / CONFIG)}"
            )
        state = self.checkpoint.saved if self.finished and self.checkpoint else self._saves_state()
        record, published = result.derive(RunFolder(folder), result.kept_scores(state)), self.task.published()
        record |= {"command": shlex.join(["linvit", "fit", *self._given])}
        record |= {"conditions": conditions(str(self.trainer.strategy.root_device))}
        if published is not None:
            metric, score = next(iter(published.scores.items()))
            record |= {"published": {"metric": metric, "score": score, "source": published.source}}
        with suppress(Exception):
            record |= {"data": result.data_facts(self.data)}
        with suppress(Exception), skip_pretrained(), torch.random.fork_rng(devices=[]):
            options = {**self.facts, "compile": False}  # the network that was trained may be sharded
            network = build_task(self.settings.model, **options).measurable_network()
            image = torch.zeros(1, self.data.in_chans, *image_size(options["img_size"]))
            found = count_on_meta(network, image)
            record["costs"] |= {"parameters": found.parameters, "macs": found.matmul}
        result.write(folder / RESULT, record)

    def _saves_state(self) -> dict[str, Any]:
        """State of the callback that has saved the run's checkpoints; empty if there is none."""
        saves = (one for one in self.trainer.checkpoint_callbacks if isinstance(one, SaveCheckpoints))
        return next((one.state_dict() for one in saves), {})

    @property
    def _fits(self) -> bool:
        return self.verb == "fit"

    @property
    def _root(self) -> Path:
        """Where the folders of runs go."""
        return Path(self.settings.trainer.default_root_dir or "checkpoints").absolute()

    def _find(self) -> None:
        """Finds the run that `--resume=auto` resumes; a `ckpt_path` in a configuration is for a new run."""
        if not self._fits:
            raise UserError(f"--resume is for linvit fit; name the checkpoint of linvit {self.verb}")
        if any(option.partition("=")[0] == "--ckpt_path" for option in self.options):
            raise UserError("--resume=auto finds the checkpoint itself: leave --ckpt_path out, or --resume")
        self._found = find(self.configs, self._root, self.settings)
        self.folder, self.checkpoint, self.finished = self._found
        self.settings.resume = None  # the saved configuration names a run, and not what to do with it
        if self.checkpoint is not None:
            self.settings.ckpt_path = str(self.checkpoint.path)

    def _find_teacher(self) -> None:
        """Takes the best checkpoint of a run, or of the newest in a folder, as the teacher; null is its attention."""
        model = self.settings.model.init_args
        if not self._fits or model.get("teacher") is None:
            return
        teacher = Teacher.of(model.teacher)
        if teacher.source is not None and Path(teacher.source).is_dir():
            folder = Path(teacher.source)
            run = newest(folder, students=False) or RunFolder(folder)  # its students lie beside it
            if teacher.untrained and not run.complete:
                return  # linvit linearize continues with it
            teacher = replace(teacher, source=str(checkpoint_in(run.folder, run.best, "--model.teacher.source")))
            given = isinstance(model.teacher, dict)
            model.teacher = {**model.teacher, "source": teacher.source} if given else teacher.source
        model.attention = kept_attention(model.attention, teacher)

    def _find_pretrained(self) -> None:
        """Takes the best checkpoint of a run for its folder, with the weights that predict."""
        model = self.settings.model.init_args
        given = model.get("pretrained") or {}
        options = {"source": given} if isinstance(given, str) else dict(given)
        if isinstance(folder := options.get("source"), str) and (Path(folder) / CHECKPOINTS).is_dir():
            averaged = options.get("ema", RunFolder(Path(folder)).model.get("predict_with") == "ema")
            path = checkpoint_in(folder, best_checkpoints("ema" if averaged else "raw"), "--model.pretrained")
            model.pretrained = {**options, "source": str(path), "ema": averaged}

    def _check(self) -> None:
        """Checks what would fail after data and task are built; settles the precision."""
        settings = self.settings
        settings.weights_only = True
        if settings.stages:
            raise UserError("these are several runs, one for each of the stages: train them with linvit linearize")
        check_number("requeue_exit_code", settings.requeue_exit_code, at_least=1, at_most=255, whole=True)
        STOP.requeue_exit_code = settings.requeue_exit_code
        check_strategy(settings.trainer.strategy)
        if settings.trainer.precision is None:  # written down, so that a resumed run keeps it
            settings.trainer.precision = default_precision(settings.trainer.accelerator)
        if self.verb in ("validate", "test"):
            settings.verbose = False  # our table is printed instead
        if self._fits:
            check_writable(self.folder or self._root / run_name(self.configs))
            if not self.finished:
                self.task.load_teacher()  # before there is a folder
        elif self.checkpoint is None and len(self.options) < len(self._given):
            rank_zero_warn("no --ckpt_path is given: these are the results of a model that was not trained")
        elif self.checkpoint is None:
            model = self.settings.model.as_dict()["init_args"]
            if not any(part.get("pretrained") for part in (model, model["backbone"]) if isinstance(part, dict)):
                run = run_of_config(self.configs)
                raise UserError(NO_WEIGHTS.format(self.verb, shown(run) if run is not None else "RUN"))

    def _trainer(self, data: ImageData, task: Task) -> Trainer:
        """Training logs to the folder of the run; the other verbs make no folder of their own."""
        built = instantiate(
            self.settings, trainer=TrainerOptions, checkpoint=SaveCheckpoints, non_finite=NonFiniteGuard
        )
        options = dict(built.trainer)
        for name in ("accumulate_grad_batches", "log_every_n_steps", "check_val_every_n_epoch"):  # Lightning divides by
            if options[name] is not None:
                check_number(f"--trainer.{name}", options[name], at_least=1, whole=True)
        options["accelerator"] = usable_accelerator(options["accelerator"])
        saves = options["enable_checkpointing"] is not False
        callbacks = as_list(options["callbacks"])
        bar, summary = (options[f"enable_{name}"] is not False for name in ("progress_bar", "model_summary"))
        options["enable_model_summary"] = False  # Lightning would say that there is one
        add_displays(callbacks, bar=bar, summary=summary)
        rank = self._fits and options["logger"] is not False and not options["fast_dev_run"]
        rank &= self.settings.attention_rank and not any(isinstance(one, AttentionRank) for one in callbacks)
        callbacks += [built.checkpoint, built.non_finite, *default_callbacks(rank=rank)]
        step = 0 if self.checkpoint is None or self.checkpoint.run != self.folder else self.checkpoint.step
        if self._fits:
            options["logger"] = run_loggers(options["logger"], *self._version(step))
            callbacks += [RowCount(logger) for logger in options["logger"] if isinstance(logger, CsvLogger)]
        elif self.settings.trainer.logger is None:
            options["logger"] = False
        if not saves:
            callbacks = [callback for callback in callbacks if not isinstance(callback, CheckpointCallback)]
        if not options["fast_dev_run"]:
            name = f"config_from_step_{step}.yaml" if self.folder is not None and step else "config.yaml"
            callbacks.append(SaveRunConfig(self.parser.dump(self.settings, skip_unset=False), name))
        if self._found is not None:
            callbacks.append(SameCheckpoint(self._found))
        if options["sync_batchnorm"]:
            options["plugins"] = [*as_list(options["plugins"]), SyncBatchNorm()]
        try:
            trainer = Trainer(**{**options, "callbacks": callbacks})
        except (ValueError, TypeError, MisconfigurationException) as error:
            hint = f". {launcher_hint()}" if launcher_hint() else ""
            raise UserError(f"these --trainer options do not go together or do not exist: {error}{hint}") from error
        except (RuntimeError, KeyError) as error:  # of a scheduler's variables
            if not launcher_hint():
                raise
            raise UserError(f"the processes of this run cannot be counted: {error}. {launcher_hint()}") from error
        check_processes(trainer)
        if self._fits:
            check_monitors(callbacks, task, trainer)
        if options["sync_batchnorm"] and trainer.world_size > 1 and isinstance(trainer.accelerator, CPUAccelerator):
            raise UserError("torch normalises batches over ranks on GPUs only: leave out --trainer.sync_batchnorm")
        check_nccl(trainer)
        self._ranks = Ranks(trainer, self.resume_with)
        if not self._fits:
            anywhere = self.checkpoint is not None or self.verb == "predict"
            task.report_folder = self.folder or (Path() if anywhere else None)
        return trainer

    def _version(self, step: int) -> tuple[Path, str | None, int | None]:
        """Where versions lie, the one that is resumed, and the step from which its curves continue."""
        if self.folder is None:
            return self._root / run_name(self.configs), None, None
        return self.folder.parent, self.folder.name, self.checkpoint.purge_step if self.checkpoint and step else step
