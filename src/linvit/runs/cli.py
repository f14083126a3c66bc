"""The LightningCLI of `linvit fit | validate | test | predict`."""

from argparse import ArgumentError
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from linvit.callbacks import ImageCount, NonFiniteGuard, SaveCheckpoints
from linvit.data.base import ImageData
from linvit.errors import UserError, check_number
from linvit.files import LAST
from linvit.runs.bases import configs, with_bases
from linvit.runs.callbacks import with_progress_bar
from linvit.runs.checkpoint import Checkpoint, checkpoint_in
from linvit.runs.endings import in_words, unsaved
from linvit.runs.loggers import check_loggers, run_loggers
from linvit.runs.parser import build_task, readable
from linvit.runs.paths import check_writable, run_name, run_of_config, shown
from linvit.runs.precision import default_precision
from linvit.runs.ranks import Ranks
from linvit.runs.resume import SameCheckpoint, find
from linvit.runs.score_table import score_table
from linvit.runs.summary import run_summary
from linvit.runs.sync_batch_norm import check_sync_batch_norm, with_sync_batch_norm
from linvit.signals import STOP
from linvit.tasks.base import SET_BY_DATA, Task

NO_CONFIG = (
    "linvit {0} needs a configuration, which names the model and the data: linvit {0} --config {1}. "
    "linvit list configs names those that come with linvit"
)
UNTRAINED = "--untrained"
NO_WEIGHTS = (
    "linvit {0} needs weights: those of a run, --ckpt_path {1}, or of a file, --model.pretrained=FILE. To use the "
    "random ones of a new model, say so: --untrained"
)
PRINT_CONFIG = (
    "a precision of null is chosen when the run starts, and the effective peak learning rate scales with its batch: "
    "the run prints both at its start, and writes them to config.yaml (trainer.precision) and hparams.yaml (peak_lr)"
)


class LinvitCLI(LightningCLI):
    """LightningCLI with linvit's rules: the data sets the model's classes, a checkpoint decides the model."""

    checkpoint: Checkpoint | None = None
    _run: Path | None = None
    _named: dict[str, Any]  # options of the model as the user gave them
    _same_checkpoint: SameCheckpoint | None = None

    @property
    def settings(self) -> Namespace:
        """The parsed configuration of the verb."""
        settings: Namespace = self.config[self.config.subcommand]
        return settings

    @property
    def is_fit(self) -> bool:
        """Whether the verb trains."""
        return bool(self.config.subcommand == "fit")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds `--checkpoint.*` and `--non_finite.*`, and links the facts of the data to the model."""
        parser.add_argument(
            "--base",
            type=str | list[str] | None,
            help="In a configuration: files or names that it starts from.",
        )
        parser.add_argument(
            "--resume",
            type=Literal["auto"] | None,
            help="Of fit: auto goes on with the newest run of this configuration, or starts one.",
        )
        parser.add_argument(
            "--requeue_exit_code",
            type=int,
            default=STOP.requeue_exit_code,
            help="Exit code of a run under SLURM that a signal other than Ctrl-C has ended, for it to be queued again.",
        )
        parser.add_lightning_class_args(SaveCheckpoints, "checkpoint")
        parser.add_lightning_class_args(NonFiniteGuard, "non_finite")
        for name in SET_BY_DATA:
            source = partial(self._from_data, name)
            source.__name__ = name  # type: ignore[attr-defined]  # the help has it
            parser.link_arguments("data", f"model.init_args.{name}", source, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses; what is wrong is a `UserError`."""
        given = cast("list[str]", args)
        self.argv = argv = [word for word in given if word != UNTRAINED or given[0] == "fit"]
        self._untrained = len(argv) < len(given)
        self.configs = configs(argv)
        if any(argument.startswith("--print_config") for argument in argv):
            rank_zero_info(PRINT_CONFIG)
        try:
            self.config = parser.parse_args(with_bases(argv))
        except ArgumentError as error:
            files = configs(with_bases(argv))
            if not files and "are required" in error.message:
                example = "quickstart" if argv[0] == "fit" else "RUN/config.yaml --ckpt_path RUN"
                raise UserError(NO_CONFIG.format(argv[0], example)) from error
            message = readable(error.message).replace("parsing config", f"parsing config {', '.join(files)}")
            raise UserError(f"{message}\nSee linvit {argv[0]} --help") from error

    def _parse_ckpt_path(self) -> None:
        """Lets the checkpoint decide the model. Lightning's does less: it keeps options that the checkpoint lacks."""
        if self.settings.resume:
            self._find_run()
        if self.checkpoint is None and self.settings.ckpt_path:
            self.settings.ckpt_path = self._file_of(self.settings.ckpt_path)
            self.checkpoint = Checkpoint(self.settings.ckpt_path, resumed=self.is_fit)
        if self.checkpoint is not None:
            self._named = self.settings.model.as_dict()
            if self.is_fit:
                self.checkpoint.check_epochs(self.settings.trainer.max_epochs)
            self._run = self._run or self.checkpoint.run
            self.checkpoint.decide(self.settings.model)

    def _file_of(self, path: str) -> str:
        """The checkpoint that `--ckpt_path` names: of a run's folder its last to continue it, otherwise its best."""
        if self.is_fit:
            return str(checkpoint_in(path, [LAST]))
        best, average = self.settings.checkpoint.filename, self.settings.model.init_args.get("predict_with") == "ema"
        return str(checkpoint_in(path, [f"{best}_ema.ckpt"] * average + [f"{best}.ckpt"]))

    def _find_run(self) -> None:
        """Finds the run that `--resume=auto` goes on with; a `ckpt_path` in a configuration is for a new run."""
        if not self.is_fit:
            raise UserError(f"--resume is for linvit fit; name the checkpoint of linvit {self.config.subcommand}")
        if any(argument.partition("=")[0] == "--ckpt_path" for argument in self.argv):
            raise UserError("--resume=auto finds the checkpoint itself: leave --ckpt_path out, or --resume")
        found = find(self.configs, self._root, self.settings)
        self._run, self.checkpoint = found
        self._same_checkpoint = SameCheckpoint(found)
        self.settings.resume = None  # the saved configuration names a run, and not what to do with it
        if self.checkpoint is not None:
            self.settings.ckpt_path = str(self.checkpoint.path)

    def before_instantiate_classes(self) -> None:
        """Checks the output folder; settles the precision; has the checkpoint loaded safely."""
        self.settings.weights_only = True
        check_number("requeue_exit_code", self.settings.requeue_exit_code, at_least=1, at_most=255, whole=True)
        STOP.requeue_exit_code = self.settings.requeue_exit_code
        check_loggers(self.settings.trainer.logger)
        if self.settings.trainer.precision is None:  # written down, so that a resumed run keeps it
            self.settings.trainer.precision = default_precision(self.settings.trainer.accelerator)
        if self.config.subcommand in ("validate", "test"):
            self.settings.verbose = False  # our table is printed instead
        if self.is_fit:
            check_writable(self.run_folder)
            if self.resumed_run is not None:
                name = f"config_from_step_{self._step}.yaml" if self._step else "config.yaml"
                self.save_config_kwargs = {"config_filename": name}
        elif self.checkpoint is None and self._untrained:
            rank_zero_warn("no --ckpt_path is given: these are the results of a model that was not trained")
        elif self.checkpoint is None and not self._has_weights:
            run = run_of_config(self.configs)
            raise UserError(NO_WEIGHTS.format(self.config.subcommand, shown(run) if run is not None else "RUN"))

    @property
    def _has_weights(self) -> bool:
        """Whether the model or its backbone starts from weights that were trained."""
        backbone = self.settings.model.as_dict()["init_args"].get("backbone")
        pretrained = isinstance(backbone, dict) and backbone.get("pretrained")
        return bool(self.settings.model.init_args.get("pretrained") or pretrained)

    def instantiate_classes(self) -> None:
        """Builds everything; `pretrained` is not loaded where a checkpoint replaces the weights."""
        config = self.config.clone()
        model = config[config.subcommand].model  # the parser shall build nothing of its options
        facts = {name: None for name in SET_BY_DATA if name in model.get("init_args", {})}
        model.init_args = Namespace(facts)  # type: ignore[no-untyped-call]
        try:
            self.config_init = self.parser.instantiate(config, instantiators=[(self._build_task, Task, True)])
            self.datamodule, self.model = (self._get(self.config_init, name) for name in ("data", "model"))
            self.trainer = self.instantiate_trainer()
        except MisconfigurationException as error:
            raise UserError(f"these options do not go together or do not exist: {error}") from error
        except ValueError as error:  # jsonargparse's has the whole configuration in it
            raise (error.__cause__ or error) from (error.__cause__ and error.__cause__.__cause__)

    def _build_task(self, _: type[Task], **facts: Any) -> Task:
        """The task, with what the data says of it."""
        with nullcontext() if self.checkpoint is None else self.checkpoint.building(self._named):
            return build_task(self.settings.model, **facts)

    @property
    def resumed_run(self) -> Path | None:
        """The run folder that the checkpoint lies in, or None without a checkpoint or if it lies elsewhere."""
        return self._run

    @property
    def run_folder(self) -> Path:
        """The folder of all versions of this run, or, when a run is resumed, its own folder."""
        return self.resumed_run or self._root / run_name(self.configs)

    @property
    def _root(self) -> Path:
        return Path(self.settings.trainer.default_root_dir or "checkpoints").absolute()

    @property
    def _step(self) -> int:
        """The step from which the run goes on that is resumed."""
        return 0 if self.checkpoint is None or self.checkpoint.run != self._run else self.checkpoint.step

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Training logs to the run folder; the other verbs make no folder of their own."""
        config = self.config_init[self.config.subcommand].trainer
        if self.is_fit and config.logger is not False:
            kwargs["logger"] = run_loggers(config.logger, *self._version)
        elif self.settings.trainer.logger is None:
            kwargs["logger"] = False
        if config.enable_progress_bar is not False:
            kwargs["callbacks"] = with_progress_bar(config.callbacks)
        if config.sync_batchnorm:
            kwargs["plugins"] = with_sync_batch_norm(config.plugins)
        if config.enable_checkpointing is False:  # Lightning refuses it beside callbacks that save
            kwargs["enable_checkpointing"] = True
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise UserError(f"these --trainer options do not go together or do not exist: {error}") from error
        useless = [CheckpointCallback] * (config.enable_checkpointing is False) + [LearningRateMonitor] * (
            not trainer.loggers
        )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, tuple(useless))]
        if config.sync_batchnorm:
            check_sync_batch_norm(trainer)
        self._ranks = Ranks(trainer)
        if self._same_checkpoint is not None:
            trainer.callbacks.append(self._same_checkpoint)  # type: ignore[attr-defined]
        return trainer

    def after_instantiate_classes(self) -> None:
        """Refuses a checkpoint of another model before anything starts."""
        if self.checkpoint is not None:
            self.checkpoint.check_weights(self.model)
        if not self.is_fit:
            anywhere = self.checkpoint is not None or self.config.subcommand == "predict"
            self.model.report_folder = self.resumed_run or (Path() if anywhere else None)

    def after_validate(self) -> None:
        """Prints the scores."""
        scores = {tag: value.item() for tag, value in self.trainer.callback_metrics.items()}
        (counter,) = (callback for callback in self._callbacks if isinstance(callback, ImageCount))
        if self.trainer.is_global_zero:
            print(score_table(scores, counter.images, self.model.published()))

    after_test = after_validate

    def _run_subcommand(self, subcommand: str) -> None:
        """Runs the verb; says in words what ends it."""
        with in_words(self.trainer, self._ranks):
            super()._run_subcommand(subcommand)

    def after_fit(self) -> None:
        """Says how it went and how to go on."""
        length = "max_steps" if self.trainer.global_step == self.trainer.max_steps else "max_epochs"
        for saves in self.trainer.checkpoint_callbacks:
            if isinstance(saves, SaveCheckpoints):
                weights, run = self.model.hparams["predict_with"], Path(str(self.trainer.log_dir))
                rank_zero_info(run_summary(saves, weights, run, length))
        if missing := unsaved(self.trainer):
            raise UserError(missing)

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    @property
    def _version(self) -> tuple[Path, str | None, int | None]:
        """Where versions lie, the one that is resumed, and the step from which its curves go on."""
        if self.resumed_run is None:
            return self.run_folder, None, None
        purge_step = self.checkpoint.purge_step if self.checkpoint is not None and self._step else self._step
        return self.resumed_run.parent, self.resumed_run.name, purge_step

    def _from_data(self, name: str, data: ImageData) -> Any:
        """An argument of the model that the data sets; a checkpoint has its own, which must agree with the data."""
        if self.checkpoint is not None:
            must_agree = name == "num_classes" and self.config.subcommand != "predict"
            return self.checkpoint.from_data(name, data.num_classes if must_agree else None, data.in_chans)
        value = getattr(data, name)
        if value is None and name == "num_classes":
            way = data.how_to_count or data.how_to_label
            raise UserError(
                f"the data does not say how many classes there are. To train, {way}; to predict, set --data.num_classes"
            )
        return value
