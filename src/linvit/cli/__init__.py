"""The `linvit` command: verbs that train go to Lightning, the others are plain functions."""

import importlib
import os
import re
import sys
from importlib.metadata import version

from linvit.cli.removed import check_removed
from linvit.errors import UserError, find_user_error
from linvit.plain_text import PrintableStream
from linvit.signals import STOP

VERBS = ("fit", "validate", "test", "predict")
HELP = """linvit: every linear attention, in every vision backbone, on every task.

usage: linvit VERB [options]

  fit        train a model:
               linvit fit --config quickstart --model.attention=linear
  validate   score a checkpoint on the validation split
  test       score it on the test split:
               linvit test --config RUN/config.yaml --ckpt_path RUN
  predict    predict images with a trained network:
               linvit predict --model RUN photos --output out
  linearize  train a copy of a trained network with another attention
  compare    run variants with several seeds, and make one table of them
  list       attentions, backbones, heads and configurations, plug-ins included
  check      hold a mechanism or backbone, yours included, to its contract
  import-weights
             write an official checkpoint as a file for --model.pretrained
  data       decode every image of a set and list those that cannot be used
  bench      what mechanisms and backbones cost: time, memory and operations
  analyze    ranks and maps of a trained model's attention, as a page
  probe      kNN and linear classifiers on frozen features, layer by layer
  evaluate   a classifier on ImageNet-V2, A, R, C, ReaL ..., and its calibration
  export     write a trained network as ONNX or by torch.export, and check it
  push       a trained network to the hub, or to a folder

A configuration is a file, or one that comes with linvit: linvit list configs.
Runs are kept in checkpoints/CONFIG_NAME/version_N. Watch them with
  tensorboard --logdir checkpoints
`linvit VERB --help` explains a verb; `linvit --version` prints the version.
"""
PLAIN = tuple(verb for verb in re.findall(r"^  ([a-z-]+)(?=  |$)", HELP, re.MULTILINE) if verb not in VERBS)
"""Verbs that are plain functions: main(argv) -> exit code."""
TASK = re.compile(r"(\w+\.)*[A-Z]\w*[a-z]\w*")  # the class of one, as a value of --model
OF_FILES = ("analyze", "data", "evaluate", "export", "import-weights", "linearize", "probe", "push")
"""Verbs that open files of strangers, as predict --model does: they know local modules only if the user names code."""
CODE = re.compile(r"(-c|--config)(=.*)?|(.*\W)?[\w.]+:[A-Za-z_]\w*\W*|--(trainer\.\w+\+?|data|model)=.*\w\.\w.*")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code. What the user can fix is printed without a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    if not isinstance(sys.stdout, PrintableStream):  # before a library keeps the stream
        sys.stdout, sys.stderr = PrintableStream(sys.stdout), PrintableStream(sys.stderr)
    _prepare(argv)
    try:
        check_removed(argv)
        code = _run(argv[0] if argv else "--help", argv)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads the output to its end, as in `linvit list | head`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (Python flushes it when it exits)
        return 1
    except Exception as error:
        mistake = find_user_error(error)
        if mistake is None:
            if isinstance(error, ImportError):
                print("linvit: a package cannot be imported; pip check names packages that do not fit", file=sys.stderr)
            raise
        message = str(mistake).rpartition("UserError: ")[2]  # a loader process sends its traceback along
        print(f"linvit: error: {message}", file=sys.stderr)
        return 2
    return code


def _run(verb: str, argv: list[str]) -> int:
    if verb in ("-h", "--help", "help"):
        print(HELP, end="")
    elif verb == "--version":
        print(f"linvit {version('linvit')}")
    elif verb in PLAIN:
        return int(importlib.import_module(f"linvit.cli.{verb.replace('-', '_')}").main(argv[1:]))
    elif verb not in VERBS:
        known = ", ".join([*VERBS, *PLAIN])
        raise UserError(f"linvit has no verb '{verb}'. It has: {known}. See linvit --help")
    elif verb == "predict" and _names_a_network(argv):
        return int(importlib.import_module("linvit.cli.predict").main(argv[1:]))
    else:
        with STOP.caught():  # while torch is imported, too
            from linvit.cli.training.command_line import train

            train(argv)
    return 0


def _names_a_network(argv: list[str]) -> bool:
    """Whether `linvit predict` is given a trained network by --model: not the class of a task, nor a configuration."""
    given = dict(zip(argv, [*argv[1:], ""], strict=True))
    given |= dict(option.split("=", 1) for option in argv if option.startswith(("--model=", "--config=")))
    model = given.get("--model")
    return model is not None and "--config" not in given and (os.path.exists(model) or not TASK.fullmatch(model))


def _prepare(argv: list[str]) -> None:
    """Sets what torch reads when it is imported, unless the user has set it; makes local modules known.

    OpenMP's threads spin while they wait, and by default GCC's for so long that two processes on the same cores spend
    most of their time on it. Of torch's C++ code only errors are shown: a rank's end causes a hundred warnings.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}  # GCC's OpenMP goes by the second alone
    os.environ["PYTHON_COLORS"] = "0"  # tracebacks in colour, whose codes would be written out
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    verb = argv[0] if argv else ""
    opens_files = verb in OF_FILES or "--report" in argv or (verb == "predict" and _names_a_network(argv))
    if "" not in sys.path and (not opens_files or any(map(CODE.fullmatch, argv))):
        sys.path.append("")  # the current folder, for classes such as --model.attention=my_module:MyAttention
