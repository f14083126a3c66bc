"""`linvit fit | validate | test | predict`: from the command line to a run, or to the help."""

from linvit.cli.training.help import short_help
from linvit.runs.memory import keep_memory
from linvit.runs.messages import hide_library_messages
from linvit.runs.parser import CommandLine
from linvit.runs.run import Run

HELP = ("-h", "--help")


def train(argv: list[str]) -> None:
    """Does what a command line says; with --help explains the classes that it names instead."""
    keep_memory()
    hide_library_messages()
    verb, *options = ["--help" if argument == "--help=all" else argument for argument in argv if argument not in HELP]
    if set(HELP).isdisjoint(argv):
        Run(verb, options).start()
    elif options:
        settings = CommandLine(verb, options).config
        print(short_help(verb, settings.model.class_path, settings.data.class_path))
    else:
        print(short_help(verb))
