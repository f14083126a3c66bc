"""Run of a configuration, whose data, task and trainer are built on first use."""

import pkgutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from linvit.analysis.operations import count_on_meta
from linvit.callbacks.attention.measurement import AttentionRank
from linvit.callbacks.common import class_names
from linvit.callbacks.monitors import ImageCount
from linvit.callbacks.non_finite import NonFiniteGuard
from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.data.base import ImageData
from linvit.errors import UserError, check_number
from linvit.image_size import image_size
from linvit.io.files import check_writable, resume_command
from linvit.io.plain_text import in_shell, shown
from linvit.io.signals import STOP
from linvit.registry.signatures import parameters_of
from linvit.runs import result
from linvit.runs.checkpoint import Checkpoint, Found, SameCheckpoint, read_checkpoint
from linvit.runs.conditions import conditions
from linvit.runs.endings import Ranks, report_exit, run_summary, score_table
from linvit.runs.folder import (
    CONFIG,
    RESULT,
    RunFolder,
    flat,
    run_config,
    run_name,
    run_of_config,
)
from linvit.runs.loggers import CsvLogger, RowCount, run_loggers
from linvit.runs.options import Source, read_config, replace_options, whole_names
from linvit.runs.parser import Config, TrainerOptions, build_task, config_text, instantiate, parse
from linvit.runs.resolve import check_epochs, find_checkpoint, find_pretrained, find_run, find_teacher, root_of
from linvit.runs.trainer import (
    SaveRunConfig,
    SyncBatchNorm,
    add_displays,
    as_list,
    check_monitors,
    check_processes,
    check_strategy,
    default_callbacks,
    default_precision,
    launcher_hint,
    usable_accelerator,
)
from linvit.tasks.base import SET_BY_DATA, Task
from linvit.tasks.pretrained import skip_pretrained

NO_WEIGHTS = (
    "linvit {0} needs weights: those of a run, --ckpt_path {1}, or of a file, --model.pretrained=FILE. To use the "
    "random weights of a new model: --untrained"
)


def fit(source: Source | Sequence[Source], options: Mapping[str, Any] | None = None, /, **named: Any) -> "Run":
    """Trains a configuration, as `linvit fit` does, and returns the run.

    Args:
        source: The configuration, as in `read_config`.
        options: Options with other values, as in `replace_options`.
        **named: Options by the last part of their names: `attention` for `model.attention`.

    Raises:
        UserError: If an option does not exist, if several options have the name, or if the run cannot be trained.

    Example:
        >>> import linvit
        >>> run = linvit.fit("quickstart", attention="focused", max_epochs=1, limit_train_batches=2)
        >>> run.folder.parent.name
        'quickstart'
    """
    config = read_config(source, options)
    return Run.from_config(replace_options(config, whole_names(config, named))).fit()


class Run:
    """Run that is trained, scored or resumed. Data, task and trainer are built on first use.

    Example:
        >>> import linvit
        >>> config = linvit.read_config("quickstart", {"trainer.max_epochs": 1, "trainer.limit_train_batches": 2})
        >>> run = linvit.Run.from_config(config).fit()
        >>> scores = run.test()
        >>> trained = run.task.predicting

    Attributes:
        config: The complete configuration; with a checkpoint, its model options are those of the checkpoint.
        folder: Folder of the run, once it exists.
        finished: True if `resume: auto` has found a finished run.
    """

    command = ""  # command that started it, for its record
    resume_with: str | None = None  # command that resumes it, for verbs other than fit

    def __init__(self, config: Config, verb: str = "fit", *, quiet: bool = False, untrained: bool = False) -> None:
        """Initialises the run from a complete configuration, as `read_config` returns it; see `from_config`."""
        self.verb, self._given, self._untrained = verb, config, untrained
        self.folder: Path | None = None
        self.finished = False
        self.checkpoint: Checkpoint | None = None  # checkpoint to resume or score
        self._found: Found | None = None
        if (seed := config["seed_everything"]) is not False:
            config = {**config, "seed_everything": seed_everything(None if seed is True else seed, workers=True)}
        config = find_pretrained(find_teacher(config) if self._fits else config)
        self._named = config["model"]  # as given by the user
        if config["resume"]:
            if not self._fits:
                raise UserError(f"--resume is for linvit fit; name the checkpoint of linvit {verb}")
            config, self._found = find_run(config)
            self.folder, self.checkpoint, self.finished = self._found
        if self.checkpoint is None:
            config, self.checkpoint = find_checkpoint(config, self._fits)
        if self.checkpoint is not None and not self.finished:
            if self._fits:
                check_epochs(config, self.checkpoint)
            self.folder = self.folder or self.checkpoint.run
            config = self.checkpoint.decide(config, self._fits, told=not quiet)
        self.config: Config = config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], verb: str = "fit", **settings: bool) -> "Run":
        """Returns the run of a configuration.

        Args:
            config: A plain nested mapping, as `linvit.read_config` returns it; missing options have their defaults.
            verb: Verb for which `data`, `task` and `trainer` are built: fit, validate, test or predict.
            **settings: `quiet=True` does not print which options the checkpoint decides; `untrained=True` allows
                scoring a model without weights.

        Raises:
            UserError: If an option does not exist, or does not accept its value; if the checkpoint does not exist.
        """
        return cls(parse(verb, config), verb, **settings)

    def fit(self) -> "Run":
        """Trains, as `linvit fit` does, and returns the run; its files are in `folder`."""
        self._of("fit")._start()
        return self

    def validate(self) -> dict[str, float]:
        """Prints and returns the scores of the validation split, by name, as `linvit validate` does."""
        return self._of("validate")._start()

    def test(self) -> dict[str, float]:
        """Prints and returns scores of the test split, as `linvit test` does; after `fit`, of the best checkpoint."""
        return self._of("test")._start()

    def predict(self) -> None:
        """Writes predictions, as `linvit predict` does."""
        self._of("predict")._start()

    def _of(self, verb: str) -> "Run":
        """Returns this run, or a run with another verb that starts from the weights of this one."""
        if verb == self.verb:
            return self
        config = {name: value for name, value in self._given.items() if name not in ("verbose", "return_predictions")}
        if self._fits and self.folder is not None:
            config |= {"ckpt_path": str(self.folder), "resume": None}
        return Run.from_config(config, verb, untrained=self._untrained)

    @cached_property
    def data(self) -> ImageData:
        """Data module."""
        data: ImageData = instantiate(self.config, data=ImageData).data
        return data

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Arguments of the task that the data sets; those of a checkpoint, which must agree with the data."""
        known = parameters_of(pkgutil.resolve_name(self.config["model"]["class_path"]))
        data, names = self.data, [name for name in SET_BY_DATA if name in known]
        if self.checkpoint is not None:
            same_classes, way = self.verb != "predict" and not data.subset, "" if self._fits else data.how_to_restrict
            return self.checkpoint.facts(names, data, same_classes, way)
        facts = {name: getattr(data, name) for name in names}
        if facts.get("num_classes", 0) is None:
            way = data.how_to_count or data.how_to_label
            raise UserError(
                f"the data does not define the number of classes. To train, score or probe, {way}; to predict alone, "
                f"set --data.num_classes"
            )
        return facts | ({"class_names": list(facts["class_names"])} if facts.get("class_names") else {})

    @cached_property
    def task(self) -> Task:
        """Task with the facts of the data; raises a `UserError` if the weights to load do not fit."""
        facts = self.facts
        with nullcontext() if self.checkpoint is None else self.checkpoint.building(self._named):
            task = build_task(self.config["model"], **facts)
        if self.checkpoint is not None:
            self.checkpoint.check_weights(task)
        if self.data.subset:
            if self._fits or self.checkpoint is None:
                raise UserError("--data.classes=subset is for scores of a trained network: linvit test --ckpt_path RUN")
            self.data.restrict_to(class_names(task))
        return task

    def trained(self) -> Task:
        """Returns the task with the weights of the checkpoint, in evaluation mode."""
        content = read_checkpoint(self.config["ckpt_path"])
        self.task.on_load_checkpoint(content)
        self.task.load_state_dict(content["state_dict"])
        return self.task.eval()

    @cached_property
    def trainer(self) -> Trainer:
        """Trainer with the callbacks and loggers of the run; data and task are built before it."""
        self._check()
        try:
            return self._trainer(self.data, self.task)
        except MisconfigurationException as error:
            raise UserError(f"these options do not go together or do not exist: {error}") from error

    def _start(self) -> dict[str, float]:
        """Runs the verb, unless `resume: auto` has found a finished run; returns the scores."""
        if self.finished:
            if self.folder is not None and not RunFolder(self.folder).complete:  # killed before the record was written
                self._record(self.folder)
            return {}
        names = ("ckpt_path", "weights_only", "verbose", "return_predictions")
        trainer, given = self.trainer, {name: self.config[name] for name in names if name in self.config}
        scores: dict[str, float] = {}
        with report_exit(trainer, self._ranks):
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
                    run, checkpoint = RunFolder(self.folder), self.config["ckpt_path"]
                    own = ("data.", *(f"model.{name}" for name in self.task.evaluation_options))
                    options = {name: value for name, value in flat(self.config).items() if name.startswith(own)}
                    result.add_test(run, checkpoint, options, self.data, scores, counter.images)
        return scores

    def _say_how_it_went(self) -> None:
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]  # nothing is kept
            return
        trainer, run = self.trainer, Path(str(self.trainer.log_dir))  # all ranks take part in log_dir
        self.folder = run
        early = trainer.early_stopping_callbacks
        timers = [one for one in trainer.callbacks if isinstance(one, Timer)]  # type: ignore[attr-defined]
        ended_by = {
            "max_epochs=MORE": trainer.current_epoch == trainer.max_epochs,
            "max_steps=MORE": trainer.global_step == trainer.max_steps,
            "callbacks=WITHOUT_EARLY_STOPPING": any(one.stopped_epoch or one.stopping_reason_message for one in early),
            "max_time=MORE": self.config["trainer"]["max_time"]
            and any((one.time_remaining() or 1) <= 0 for one in timers),
        }
        changes = [option for option, ended in ended_by.items() if ended] or ["max_epochs=MORE"]
        for saves in self.trainer.checkpoint_callbacks:
            if isinstance(saves, SaveCheckpoints):
                rank_zero_info(run_summary(saves, self.task.hparams["predict_with"], run, changes))
        self._record(run)

    def _record(self, folder: Path) -> None:
        """Writes the record of a finished run; entries that cannot be computed are left empty."""
        if not self.trainer.is_global_zero:
            return
        if not folder.is_dir():
            raise UserError(
                f"'{folder}' was renamed or deleted before its {RESULT} was written. Give it back its name, then write "
                f"it with\n  {resume_command(folder / CONFIG)}"
            )
        state = self.checkpoint.saved if self.finished and self.checkpoint else self._saves_state()
        record, published = result.derive(RunFolder(folder), result.kept_scores(state)), self.task.published()
        record |= {"command": self.command or f"linvit fit --config {in_shell(run_config(folder))}"}
        record |= {"conditions": conditions(str(self.trainer.strategy.root_device))}
        if published is not None:
            metric, score = next(iter(published.scores.items()))
            record |= {"published": {"metric": metric, "score": score, "source": published.source}}
        with suppress(Exception):
            record |= {"data": result.data_facts(self.data)}
        with suppress(Exception), skip_pretrained(), torch.random.fork_rng(devices=[]):
            options = {**self.facts, "compile": False}  # the trained network may be sharded
            network = build_task(self.config["model"], **options).measurable_network()
            image = torch.zeros(1, self.data.in_chans, *image_size(options["img_size"]))
            found = count_on_meta(network, image)
            record["costs"] |= {"parameters": found.parameters, "macs": found.matmul}
        result.write(folder / RESULT, record)

    def _saves_state(self) -> dict[str, Any]:
        """Returns the state of the callback that saved the run's checkpoints; empty without one."""
        saves = (one for one in self.trainer.checkpoint_callbacks if isinstance(one, SaveCheckpoints))
        return next((one.state_dict() for one in saves), {})

    @property
    def _fits(self) -> bool:
        return self.verb == "fit"

    def _check(self) -> None:
        """Checks what would fail after data and task are built; sets the precision."""
        config, trainer = self.config, self.config["trainer"]
        if config["stages"]:
            raise UserError("this configuration has `stages`, several runs: train them with linvit linearize")
        check_number("requeue_exit_code", config["requeue_exit_code"], at_least=1, at_most=255, whole=True)
        STOP.requeue_exit_code = config["requeue_exit_code"]
        check_strategy(trainer["strategy"])
        precision = trainer["precision"] or default_precision(trainer["accelerator"])  # a resumed run keeps it
        self.config = {**config, "weights_only": True, "trainer": {**trainer, "precision": precision}}
        if self.verb in ("validate", "test"):
            self.config["verbose"] = False  # linvit prints its own table
        if self._fits:
            check_writable(self.folder or root_of(config) / run_name(config["config"]))
            if not self.finished:
                self.task.distillation.load(self.task)  # before the folder is created
        elif self.checkpoint is None and self._untrained:
            rank_zero_warn("no --ckpt_path is given: these are the results of an untrained model")
        elif self.checkpoint is None:
            model = config["model"]["init_args"]
            if not any(part.get("pretrained") for part in (model, model["backbone"]) if isinstance(part, dict)):
                run = run_of_config(config["config"])
                raise UserError(NO_WEIGHTS.format(self.verb, shown(run) if run is not None else "RUN"))

    def _trainer(self, data: ImageData, task: Task) -> Trainer:
        """Builds the trainer: training logs to the folder of the run; the other verbs create no folder."""
        built = instantiate(self.config, trainer=TrainerOptions, checkpoint=SaveCheckpoints, non_finite=NonFiniteGuard)
        options = dict(built.trainer)
        for name in ("accumulate_grad_batches", "log_every_n_steps", "check_val_every_n_epoch"):  # divisors
            if options[name] is not None:
                check_number(f"--trainer.{name}", options[name], at_least=1, whole=True)
        options["accelerator"] = usable_accelerator(options["accelerator"])
        saves = options["enable_checkpointing"] is not False
        callbacks = as_list(options["callbacks"])
        bar, summary = (options[f"enable_{name}"] is not False for name in ("progress_bar", "model_summary"))
        options["enable_model_summary"] = False  # otherwise Lightning would print that it has a summary
        add_displays(callbacks, bar=bar, summary=summary)
        rank = self._fits and options["logger"] is not False and not options["fast_dev_run"]
        rank &= self.config["attention_rank"] and not any(isinstance(one, AttentionRank) for one in callbacks)
        callbacks += [built.checkpoint, built.non_finite, *default_callbacks(rank=rank)]
        step = 0 if self.checkpoint is None or self.checkpoint.run != self.folder else self.checkpoint.step
        if self._fits:
            options["logger"] = run_loggers(options["logger"], *self._version(step))
            callbacks += [RowCount(logger) for logger in options["logger"] if isinstance(logger, CsvLogger)]
        elif self.config["trainer"]["logger"] is None:
            options["logger"] = False
        if not saves:
            callbacks = [callback for callback in callbacks if not isinstance(callback, CheckpointCallback)]
        if self._fits and not options["fast_dev_run"]:
            name = f"config_from_step_{step}.yaml" if self.folder is not None and step else "config.yaml"
            callbacks.append(SaveRunConfig(config_text(self.config), name))
        if self._found is not None:
            callbacks.append(SameCheckpoint(self._found))
        if options["sync_batchnorm"]:
            options["plugins"] = [*as_list(options["plugins"]), SyncBatchNorm()]
        try:
            trainer = Trainer(**{**options, "callbacks": callbacks})
        except (ValueError, TypeError, MisconfigurationException) as error:
            hint = f". {launcher_hint()}" if launcher_hint() else ""
            raise UserError(f"these --trainer options do not go together or do not exist: {error}{hint}") from error
        except (RuntimeError, KeyError) as error:  # in a scheduler's variables
            if not launcher_hint():
                raise
            raise UserError(f"the processes of this run cannot be counted: {error}. {launcher_hint()}") from error
        check_processes(trainer)
        if self._fits:
            check_monitors(callbacks, task, trainer)
        if options["sync_batchnorm"] and trainer.world_size > 1 and isinstance(trainer.accelerator, CPUAccelerator):
            raise UserError("torch normalises batches over ranks on GPUs only: remove --trainer.sync_batchnorm")
        self._ranks = Ranks(trainer, self.resume_with)
        if not self._fits:
            anywhere = self.checkpoint is not None or self.verb == "predict"
            task.report_folder = self.folder or (Path() if anywhere else None)
        return trainer

    def _version(self, step: int) -> tuple[Path, str | None, int | None]:
        """Returns the folder of the versions, the version to resume, and the first step of its new curves."""
        if self.folder is None:
            return root_of(self.config) / run_name(self.config["config"]), None, None
        return self.folder.parent, self.folder.name, self.checkpoint.purge_step if self.checkpoint and step else step
