"""The `linvit` command: verbs that train go to Lightning, the others are plain functions."""

import sys
from importlib.metadata import version

from linvit.errors import UserError

VERBS = ("fit", "validate", "test", "predict")
HELP = """linvit: every linear attention, in every vision backbone, on every task.

usage: linvit VERB [options]

  fit        train:     linvit fit --config configs/quickstart.yaml --model.attention=linear
  validate   score a checkpoint on the validation split
  test       score it on the test split:
                        linvit test --config RUN/config.yaml --ckpt_path RUN/checkpoints/best.ckpt
  predict    write RUN/predictions.csv:
                        linvit predict --config RUN/config.yaml --ckpt_path RUN/checkpoints/best.ckpt
  list       attentions, backbones and heads, plug-ins included:
                        linvit list attentions --filter "*linear*"

Runs are kept in checkpoints/CONFIG_NAME/version_N. Watch them with: tensorboard --logdir checkpoints
`linvit VERB --help` explains a verb; `linvit --version` prints the version.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code. What the user can mend is printed without a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    verb = argv[0] if argv else "--help"
    try:
        if verb in ("-h", "--help", "help"):
            print(HELP, end="")
        elif verb == "--version":
            print(f"linvit {version('linvit')}")
        elif verb == "list":
            from linvit.cli.list import main as list_main

            return list_main(argv[1:])
        else:
            if verb not in VERBS:
                raise UserError(f"linvit has no verb '{verb}'. It has: {', '.join(VERBS)}, list. See linvit --help")
            if {"-h", "--help"} & set(argv):
                from linvit.cli.help import short_help

                print(short_help(verb))
                return 0
            from linvit.cli.train import train

            train(["--help" if argument == "--help=all" else argument for argument in argv])
    except Exception as error:
        mistake = _mistake(error)
        if mistake is None:
            raise
        message = str(mistake).rpartition("UserError: ")[2]  # a loader process sends its traceback along
        print(f"linvit: error: {message}", file=sys.stderr)
        return 2
    return 0


def _mistake(error: BaseException | None) -> UserError | None:
    """The user's mistake behind an exception that a library may have wrapped."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error
