"""The `linvit` command: verbs that train go to Lightning, the others are plain functions."""

import importlib
import sys
from importlib.metadata import version

from linvit.errors import UserError

VERBS = ("fit", "validate", "test", "predict")
PLAIN = {  # plain functions: main(argv) -> exit code
    "list": "linvit.cli.list",
    "check": "linvit.cli.check",
    "import-weights": "linvit.cli.import_weights",
    "data": "linvit.cli.data",
    "bench": "linvit.cli.bench",
}
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
  check      hold a mechanism or a backbone, yours included, to its contract; all mechanisms without a name:
                        linvit check my_package.my_module:MyAttention --quick
                        linvit check --backbone flatten_swin_tiny --quick
  import-weights  an official checkpoint as a file for --model.pretrained:
                        linvit import-weights FLatten_Swin_T.pth --backbone flatten_swin_tiny -o OUT.safetensors
  data       look at every image of a set, and list what cannot be trained on:
                        linvit data check path/to/imagenet --output bad.csv
  bench      how fast images are loaded, beside timm's loader and beside a model:
                        linvit bench data path/to/imagenet --config configs/imagenet/swin_tiny.yaml

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
        elif verb in PLAIN:
            return int(importlib.import_module(PLAIN[verb]).main(argv[1:]))
        elif verb not in VERBS:
            known = ", ".join([*VERBS, *PLAIN])
            raise UserError(f"linvit has no verb '{verb}'. It has: {known}. See linvit --help")
        elif {"-h", "--help"} & set(argv):
            from linvit.cli.training.help import short_help

            print(short_help(verb))
        else:
            from linvit.cli.training.cli import train

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
