"""`linvit fit | validate | test | predict`: from the command line to one LightningCLI, or to the help."""

from lightning.pytorch import Trainer

from linvit.cli.training.help import short_help
from linvit.data.base import ImageData
from linvit.runs.callbacks import default_callbacks
from linvit.runs.cli import LinvitCLI
from linvit.runs.loggers import loggers_by_key
from linvit.runs.memory import keep_memory
from linvit.runs.messages import hide_library_messages
from linvit.runs.parser import Parser, integers_first
from linvit.runs.save_config import SaveRunConfig
from linvit.tasks import Task

HELP = ("-h", "--help")


def train(argv: list[str]) -> None:
    """Parses the command line, builds everything, runs; with --help explains the classes that it names instead."""
    explain = not set(HELP).isdisjoint(argv)
    argv = ["--help" if argument == "--help=all" else argument for argument in argv if argument not in HELP]
    if explain and len(argv) == 1:
        print(short_help(argv[0]))
        return
    command_line(HelpCLI if explain else LinvitCLI, argv)


def command_line(cli: type[LinvitCLI], argv: list[str]) -> LinvitCLI:
    """Builds the parser, and does with a command line what a class does with it."""
    keep_memory()
    hide_library_messages()
    integers_first(Trainer)
    loggers_by_key(Trainer)
    return cli(
        Task,
        ImageData,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        save_config_callback=SaveRunConfig,
        seed_everything_default=0,
        trainer_defaults={"callbacks": default_callbacks()},
        parser_class=Parser,
        parser_kwargs={"prog": "linvit"},
        args=argv,
    )


class HelpCLI(LinvitCLI):
    """Reads the command line as `LinvitCLI` does, then explains the task and the data that it names, and stops."""

    def before_instantiate_classes(self) -> None:
        """Prints the help."""
        print(short_help(self.config.subcommand, self.settings.model.class_path, self.settings.data.class_path))
        raise SystemExit(0)
