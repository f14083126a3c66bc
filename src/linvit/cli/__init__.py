"""The `linvit` command: finds the function of a verb, calls it, and prints user errors in one line."""

import os
import re
import sys
from importlib.metadata import metadata, version

from linvit.cli.training import VERBS, names_a_network
from linvit.errors import UserError, find_user_error
from linvit.io.plain_text import PrintableStream
from linvit.io.terminal import table
from linvit.registry.entries import Entry, announced
from linvit.registry.removed import check_removed

OWN = {
    **{verb: f"linvit.cli.training:{verb}" for verb in VERBS},
    "linearize": "linvit.cli.linearize:main",
    "compare": "linvit.cli.compare:main",
    "list": "linvit.cli.list:main",
    "check": "linvit.cli.check:main",
    "import-weights": "linvit.cli.import_weights:main",
    "data": "linvit.cli.data:main",
    "bench": "linvit.cli.bench:main",
    "advise": "linvit.cli.advise:main",
    "analyze": "linvit.cli.analyze:main",
    "probe": "linvit.cli.probe:main",
    "evaluate": "linvit.cli.evaluate:main",
    "export": "linvit.cli.export:main",
    "push": "linvit.cli.push:main",
}
"""Verbs of linvit and their functions, which take the arguments after the verb and return an exit code; None is 0.

`pyproject.toml` repeats them as entry points; this table is for source trees with the metadata of an older install.
"""
GROUP = "linvit.verbs"
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
  check      test a mechanism or backbone, yours included, against its contract
  import-weights
             write an official checkpoint as a file for --model.pretrained
  data       decode every image of a dataset and list those that cannot be used
  bench      costs of mechanisms and backbones: time, memory and operations
  advise     is another attention faster in a network here, and which?
  analyze    ranks and maps of a trained model's attention, as a page
  probe      kNN and linear classifiers on frozen features, layer by layer
  evaluate   score a classifier on ImageNet-V2, A, R, C, ReaL ..., and calibrate
  export     write a trained network as ONNX or by torch.export, and check it
  push       upload a trained network to the hub, or write it to a folder

A configuration is a file, or one that comes with linvit: linvit list configs.
Runs are saved in checkpoints/CONFIG_NAME/version_N. Watch them with
  tensorboard --logdir checkpoints
`linvit VERB --help` explains a verb; `linvit --version` prints the version.
"""
OF_FILES = ("advise", "analyze", "data", "evaluate", "export", "import-weights", "linearize", "probe", "push")
"""Verbs that open untrusted files, as predict --model and verbs of other packages may: they see local modules only
if the user names code."""
CODE = re.compile(r"(-c|--config)(=.*)?|(.*\W)?[\w.]+:[A-Za-z_]\w*\W*|--(trainer\.\w+\+?|data|model)=.*\w\.\w.*")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code. User errors are printed without a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    if not isinstance(sys.stdout, PrintableStream):  # before a library stores the stream
        sys.stdout, sys.stderr = PrintableStream(sys.stdout), PrintableStream(sys.stderr)
    _prepare(argv)
    try:
        check_removed(argv)
        code = _run(argv[0] if argv else "--help", argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `linvit list | head`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (Python flushes it when it exits)
        return 1
    except Exception as error:
        mistake = find_user_error(error)
        if mistake is None:
            if isinstance(error, ImportError):
                print("linvit: a package cannot be imported; pip check lists incompatible packages", file=sys.stderr)
            elif "operator torchvision::" in str(error):  # pip check does not compare builds
                print("linvit: torch and torchvision are of different builds; install both together", file=sys.stderr)
            raise
        message = str(mistake).rpartition("UserError: ")[2]  # a loader process includes its traceback
        print(f"linvit: error: {message}", file=sys.stderr)
        return 2
    return code


def verbs() -> dict[str, list[Entry]]:
    """Returns verbs by name: linvit's own, then those of other packages; nothing is imported."""
    found = {name: [Entry(name, target, "linvit")] for name, target in OWN.items()}
    for entry in announced(GROUP):
        if entry.owner != "linvit":
            found.setdefault(entry.name, []).append(entry)
    return found


def help_text() -> str:
    """Returns the text of `linvit --help`, with verbs of other packages and summaries of these packages."""
    others = [entry for name, owners in verbs().items() if name not in OWN for entry in owners]
    if not others:
        return HELP
    rows = [(f"  {entry.name}", entry.owner, metadata(entry.owner.split()[0])["Summary"] or "") for entry in others]
    return "\n".join([HELP, *table([("verbs of other packages", "", ""), *rows]), ""])


def _run(verb: str, argv: list[str]) -> int:
    if verb in ("-h", "--help", "help"):
        print(help_text(), end="")
    elif verb == "--version":
        print(f"linvit {version('linvit')}")
    else:
        known = verbs()
        owners = known.get(verb, [])
        if not owners:
            raise UserError(f"linvit has no verb '{verb}'. It has: {', '.join(known)}. See linvit --help")
        if len(owners) > 1:
            claims = " and ".join(f"{entry.owner} ({entry.target})" for entry in owners)
            raise UserError(f"several packages announce the verb '{verb}': {claims}. Uninstall all but one of them")
        return int(owners[0].load("verb")(argv[1:]) or 0)
    return 0


def _prepare(argv: list[str]) -> None:
    """Sets environment variables that torch reads on import, unless the user has set them; adds local modules.

    OpenMP's threads spin while they wait, with GCC's default for so long that two processes on the same cores spend
    most of their time spinning. Only errors of torch's C++ code are shown: the end of a rank causes a hundred warnings.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}  # GCC's OpenMP reads only the second
    os.environ["PYTHON_COLORS"] = "0"  # colour codes in tracebacks would be escaped
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    verb = argv[0] if argv else ""
    opens_files = verb in OF_FILES or verb not in OWN or "--report" in argv
    opens_files = opens_files or (verb == "predict" and names_a_network(argv))
    if "" not in sys.path and (not opens_files or any(map(CODE.fullmatch, argv))):
        sys.path.append("")  # the current folder, for classes such as --model.attention=my_module:MyAttention
