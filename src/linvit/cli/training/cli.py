"""`linvit fit | validate | test | predict`: one LightningCLI."""

import signal
import warnings
from argparse import ArgumentError
from functools import partial
from pathlib import Path
from typing import Any, cast

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from linvit.callbacks import ClassReport, PredictionWriter
from linvit.cli.training.bases import configs, with_bases
from linvit.cli.training.callbacks import keep_best_average, watchers, with_progress_bar
from linvit.cli.training.checkpoint import check_same_model, read_checkpoint
from linvit.cli.training.loggers import check_loggers, loggers_by_key, run_loggers
from linvit.cli.training.memory import keep_memory
from linvit.cli.training.parser import Parser, integers_first, readable
from linvit.cli.training.precision import default_precision
from linvit.cli.training.run_folder import check_writable, run_name, run_of_checkpoint
from linvit.cli.training.run_summary import interrupted, last_words
from linvit.cli.training.score_table import published, score_table
from linvit.data.base import ImageData
from linvit.errors import UserError
from linvit.tasks import Task
from linvit.tasks.base import EXECUTION, FACTS

NOISE = (  # warnings about libraries' own affairs
    r".*isinstance\(treespec, LeafSpec\)",
    r"You have overridden `on_after_batch_transfer`",
    r".*does not have many workers",
    r"Your `IterableDataset` has `__len__` defined",  # and it is right: see linvit.data.sources.stream
)


def train(argv: list[str]) -> None:
    """Parses the command line, builds everything, runs."""
    keep_memory()
    for noise in NOISE:
        warnings.filterwarnings("ignore", noise)
    integers_first(Trainer)
    loggers_by_key(Trainer)
    LinvitCLI(
        Task,
        ImageData,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        save_config_callback=SaveRunConfig,
        seed_everything_default=0,
        trainer_defaults={"callbacks": watchers()},
        parser_class=Parser,
        parser_kwargs={"prog": "linvit"},
        args=argv,
    )


class SaveRunConfig(SaveConfigCallback):
    """Saves the full configuration of a training run beside its checkpoints; a resumed run adds a file of its own."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Saves before training starts."""
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class LinvitCLI(LightningCLI):
    """LightningCLI with linvit's rules: the data tells the model its classes, the checkpoint decides the model."""

    checkpoint_path: str | None = None
    checkpoint: dict[str, Any] | None = None
    _best_average: ModelCheckpoint | None = None
    pretrained: str | dict[str, Any] | None = None

    @property
    def settings(self) -> Namespace:
        """The parsed configuration of the verb."""
        settings: Namespace = self.config[self.config.subcommand]
        return settings

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds `--checkpoint.*` and links the facts of the data to the model."""
        parser.add_argument(
            "--base", type=str | list[str] | None, help="In a configuration: files that it starts from, relative to it."
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/score",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best",
                "checkpoint.enable_version_counter": False,
            }
        )
        for fact in FACTS:
            parser.link_arguments("data", f"model.init_args.{fact}", partial(self._fact, fact), apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses, then lets the checkpoint decide the model."""
        argv = cast("list[str]", args)
        self.configs = configs(argv)
        try:
            self.config = parser.parse_args(with_bases(argv))
        except ArgumentError as error:
            given = configs(with_bases(argv))
            message = readable(error.message).replace("parsing config", f"parsing config {', '.join(given)}")
            raise UserError(f"{message}\nSee linvit {argv[0]} --help") from error
        if self.settings.ckpt_path:
            if self.config.subcommand != "fit":
                warnings.filterwarnings("ignore", "The dirpath has changed")  # nothing is saved
            self.checkpoint_path = str(self.settings.ckpt_path)
            self.checkpoint = read_checkpoint(self.checkpoint_path)
            self.settings.ckpt_path = None  # given back once the model's arguments are settled
            self._model_from_checkpoint(self.checkpoint["hyper_parameters"])

    def before_instantiate_classes(self) -> None:
        """Checks the output folder; settles the precision; gives the checkpoint back, to be loaded safely."""
        self.settings.ckpt_path = self.checkpoint_path
        self.settings.weights_only = True
        check_loggers(self.settings.trainer.logger)
        if self.settings.trainer.precision is None:  # written down, so that a continued run keeps it
            self.settings.trainer.precision = default_precision(self.settings.trainer.accelerator)
        if self.config.subcommand in ("validate", "test"):
            self.settings.verbose = False  # our table is printed instead
        given = self.settings.model.init_args
        if self.checkpoint is not None:
            given.pretrained, self.pretrained = None, given.pretrained  # the checkpoint has the weights
        elif self.config.subcommand != "fit" and not given.pretrained:
            rank_zero_warn("no --ckpt_path is given: these are the results of a model that was not trained")
        if self.config.subcommand == "fit":
            check_writable(self.run_folder)
            if self.checkpoint is not None and self.resumed_run is not None:
                name = f"config_from_step_{self.checkpoint['global_step']}.yaml"
                self.save_config_kwargs = {"config_filename": name, "overwrite": True}  # going on from there again

    @property
    def resumed_run(self) -> Path | None:
        """The run folder that the checkpoint lies in, or None without a checkpoint or if it lies elsewhere."""
        return run_of_checkpoint(self.checkpoint_path) if self.checkpoint_path else None

    @property
    def run_folder(self) -> Path:
        """The folder of all versions of this run, or, when a run is continued, its own folder."""
        root = Path(self.settings.trainer.default_root_dir or "checkpoints").absolute()
        return self.resumed_run or root / run_name(self.configs)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Training logs to the run folder; the other verbs make no folder of their own."""
        config = self.config_init[self.config.subcommand].trainer
        if self.config.subcommand == "fit" and config.logger is not False:
            kwargs["logger"] = run_loggers(config.logger, *self._version)
        elif self.settings.trainer.logger is None:
            kwargs["logger"] = False
        if config.enable_progress_bar is not False:
            kwargs["callbacks"] = with_progress_bar(config.callbacks)
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, MisconfigurationException) as error:
            raise UserError(f"these --trainer options do not go together or do not exist: {error}") from error

    def after_instantiate_classes(self) -> None:
        """Refuses a checkpoint of another model before anything starts; keeps the best moving average."""
        if self.checkpoint is not None:
            self.settings.model.init_args.pretrained = self.pretrained  # for the saved configuration
            check_same_model(str(self.checkpoint_path), self.checkpoint["state_dict"], self.model)
            self.checkpoint = None
        if self.model.hparams["ema_decay"] is not None:  # in the other verbs, too, lest Lightning miss it
            self._best_average = keep_best_average(self.settings.checkpoint)
            if self._best_average is not None:
                # before last.ckpt is written, which holds the best score so far
                names = [getattr(callback, "filename", None) for callback in self._callbacks]
                self._callbacks.insert(names.index("last"), self._best_average)

    def before_validate(self) -> None:
        """What is told of each class goes beside the checkpoint's run."""
        self._class_report.folder = self.resumed_run or Path()

    def after_validate(self) -> None:
        """Prints the scores."""
        scores = {tag: value.item() for tag, value in self.trainer.callback_metrics.items()}
        if self.trainer.is_global_zero:
            print(score_table(scores, self._class_report.images, published(self.model.hparams)))

    before_test, after_test = before_validate, after_validate

    def before_predict(self) -> None:
        """Predictions go beside the checkpoint's run, unless the configuration names a writer."""
        if not any(isinstance(callback, PredictionWriter) for callback in self._callbacks):
            self._callbacks.append(PredictionWriter((self.resumed_run or Path()) / "predictions.csv"))

    def _run_subcommand(self, subcommand: str) -> None:
        """Runs the verb; a run that is told to end says so in words and in its exit code, which Lightning leaves 0."""
        try:
            super()._run_subcommand(subcommand)
        except (SIGTERMException, RuntimeError) as error:
            # A cluster tells all processes to end, and torch may hear of its loader processes first.
            if isinstance(error, RuntimeError) and "killed by signal: Terminated" not in str(error):
                raise
            if subcommand == "fit":
                rank_zero_info(interrupted(Path(str(self.trainer.log_dir)), self.trainer.global_step))
            raise SystemExit(128 + signal.SIGTERM) from error

    def after_fit(self) -> None:
        """Says how it went and how to go on."""
        keeper = self.trainer.checkpoint_callback
        if not isinstance(keeper, ModelCheckpoint) or not keeper.best_model_path:
            return
        rank_zero_info(last_words(keeper, self._best_average, Path(str(self.trainer.log_dir))))

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    @property
    def _class_report(self) -> ClassReport:
        """The one that `watchers` made; a configuration may add others."""
        return [callback for callback in self._callbacks if isinstance(callback, ClassReport)][-1]

    @property
    def _version(self) -> tuple[Path, str | None, int | None]:
        """Where versions lie, the one that is continued, and the step from which its curves go on."""
        if self.checkpoint is None or self.resumed_run is None:
            return self.run_folder, None, None
        return self.resumed_run.parent, self.resumed_run.name, self.checkpoint["global_step"]

    def _model_from_checkpoint(self, decided: dict[str, Any]) -> None:
        """Takes the model's arguments from the checkpoint, and says which given ones were ignored."""
        given = self.settings.model.init_args
        unknown = [name for name in decided if name not in given and name not in FACTS]
        if unknown:
            raise UserError(
                f"checkpoint '{self.checkpoint_path}' belongs to another task: {self.settings.model.class_path} "
                f"takes no {', '.join(unknown)}"
            )
        for name, value in {"pretrained": None, **decided}.items():
            if name in FACTS or name in EXECUTION:  # linked to the data, see _fact; no part of the model
                continue
            if _plain(given[name]) != _plain(value):
                rank_zero_info(
                    f"the checkpoint decides the model: --model.{name}={given[name]} is ignored, it is {value}. "
                    f"To train another model, leave --ckpt_path out"
                )
            given[name] = value

    def _fact(self, name: str, data: ImageData) -> Any:
        """A fact of the data for the model; with a checkpoint its own facts hold, and must agree with the data."""
        if self.checkpoint is None:
            fact = getattr(data, name)
            if fact is None and name == "num_classes":
                raise UserError(
                    "the data has no labels, so the number of classes is unknown. To train, give each class a folder, "
                    "train/CLASS/*.jpg (images directly in train/ have no class), or name the column of labels with "
                    "--data.label_column; to predict, set --data.num_classes"
                )
            return fact
        decided = self.checkpoint["hyper_parameters"][name]
        found = data.num_classes if name == "num_classes" and self.config.subcommand != "predict" else None
        if found is not None and found != decided:
            raise UserError(
                f"checkpoint '{self.checkpoint_path}' was trained on {decided} classes, but the data has {found}"
            )
        return decided


def _plain(value: Any) -> Any:
    """Tuples as lists, so that a value compares equal however it was written."""
    return list(value) if isinstance(value, tuple) else value
