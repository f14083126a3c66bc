"""`linvit fit | validate | test | predict`: one LightningCLI."""

import warnings
from argparse import ArgumentError
from functools import partial
from pathlib import Path
from typing import Any, cast

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from linvit.callbacks import ImageGrid, PredictionWriter, Throughput
from linvit.cli.checkpoint import check_same_model, read_checkpoint
from linvit.cli.parser import Parser, integers_first, readable
from linvit.cli.run_folder import check_writable, run_name, run_of_checkpoint
from linvit.data.base import ImageData
from linvit.errors import UserError
from linvit.tasks import Task
from linvit.tasks.base import FACTS

NOISE = (  # warnings about libraries' own affairs
    r".*isinstance\(treespec, LeafSpec\)",
    r"You have overridden `on_after_batch_transfer`",
    r".*does not have many workers",
)


def train(argv: list[str]) -> None:
    """Parses the command line, builds everything, runs."""
    for noise in NOISE:
        warnings.filterwarnings("ignore", noise)
    integers_first(Trainer)
    LinvitCLI(
        Task,
        ImageData,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        save_config_callback=SaveRunConfig,
        seed_everything_default=0,
        trainer_defaults={"callbacks": [LearningRateMonitor("step"), Throughput(), ImageGrid(), keep_last()]},
        parser_class=Parser,
        parser_kwargs={"prog": "linvit"},
        args=argv,
    )


def keep_last() -> ModelCheckpoint:
    """Writes last.ckpt after every epoch; `save_last` of the one that keeps the best writes only when that does."""
    return ModelCheckpoint(filename="last", enable_version_counter=False)


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
    pretrained: str | dict[str, Any] | None = None

    @property
    def settings(self) -> Namespace:
        """The parsed configuration of the verb."""
        settings: Namespace = self.config[self.config.subcommand]
        return settings

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds `--checkpoint.*` and links the facts of the data to the model."""
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
        try:
            self.config = parser.parse_args(argv)
        except ArgumentError as error:
            given = [part.removeprefix("--config=") for part in argv if part.endswith((".yaml", ".yml"))]
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
        """Checks the output folder; gives the checkpoint back to Lightning, to be loaded safely."""
        self.settings.ckpt_path = self.checkpoint_path
        self.settings.weights_only = True
        given = self.settings.model.init_args
        if self.checkpoint is not None:
            given.pretrained, self.pretrained = None, given.pretrained  # the checkpoint has the weights
        elif self.config.subcommand != "fit" and not given.pretrained:
            rank_zero_warn("no --ckpt_path is given: these are the results of a model that was not trained")
        if self.config.subcommand == "fit":
            check_writable(self.run_folder)
            if self.checkpoint is not None and self.resumed_run is not None:
                self.save_config_kwargs = {"config_filename": f"config_from_step_{self.checkpoint['global_step']}.yaml"}

    @property
    def resumed_run(self) -> Path | None:
        """The run folder that the checkpoint lies in, or None without a checkpoint or if it lies elsewhere."""
        return run_of_checkpoint(self.checkpoint_path) if self.checkpoint_path else None

    @property
    def run_folder(self) -> Path:
        """The folder of all versions of this run, or, when a run is continued, its own folder."""
        root = Path(self.settings.trainer.default_root_dir or "checkpoints").absolute()
        return self.resumed_run or root / run_name([config.relative for config in self.settings.config or []])

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Training logs to the run folder; the other verbs make no folder of their own."""
        if self.settings.trainer.logger is None:
            kwargs["logger"] = self._tensorboard() if self.config.subcommand == "fit" else False
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, MisconfigurationException) as error:
            raise UserError(f"these --trainer options do not go together or do not exist: {error}") from error

    def after_instantiate_classes(self) -> None:
        """Refuses a checkpoint of another model before anything starts."""
        if self.checkpoint is not None:
            self.settings.model.init_args.pretrained = self.pretrained  # for the saved configuration
            check_same_model(str(self.checkpoint_path), self.checkpoint["state_dict"], self.model)
            self.checkpoint = None

    def before_predict(self) -> None:
        """Predictions go beside the checkpoint's run, unless the configuration names a writer."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, PredictionWriter) for callback in callbacks):
            callbacks.append(PredictionWriter((self.resumed_run or Path()) / "predictions.csv"))

    def after_fit(self) -> None:
        """Says how it went and how to go on."""
        keeper = self.trainer.checkpoint_callback
        if not isinstance(keeper, ModelCheckpoint) or not keeper.best_model_path:
            return
        config = Path(str(self.trainer.log_dir)) / "config.yaml"
        best = Path(keeper.best_model_path)
        last = best.with_name("last.ckpt")
        score = "none" if keeper.best_model_score is None else f"{keeper.best_model_score:.4f}"
        rank_zero_info(
            f"\n  best {keeper.monitor}  {score}\n"
            f"  checkpoint      {_shown(best)}\n"
            f"  test it         linvit test --config {_shown(config)} --ckpt_path {_shown(best)}\n"
            f"  go on training  linvit fit --config {_shown(config)} --ckpt_path {_shown(last)}\n"
            f"  look at it      tensorboard --logdir {_shown(config.parent.parent)}\n"
        )

    def _tensorboard(self) -> TensorBoardLogger:
        """A continued run goes on in its own folder, and its curves go on where the checkpoint was made."""
        if self.checkpoint is None or self.resumed_run is None:
            return TensorBoardLogger(self.run_folder.parent, self.run_folder.name, default_hp_metric=False)
        versions, version = self.resumed_run.parent, self.resumed_run.name
        step = self.checkpoint["global_step"]
        return TensorBoardLogger(versions.parent, versions.name, version, default_hp_metric=False, purge_step=step)

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
            if name in FACTS:  # linked to the data, see _fact
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
                raise UserError("the data has no labels, so the number of classes is unknown; set --data.num_classes")
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


def _shown(path: Path) -> Path:
    """A path relative to the current folder if it lies in it."""
    absolute = path.absolute()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute
