"""Verbs and options that this release has removed, and what to use instead.

`linvit.removed` has the options of configurations and checkpoints. The next minor release drops the rows of this one.
"""

from collections.abc import Iterator, Sequence

from linvit.errors import UserError

REMOVED = {
    "bench --roofline": "Use benchmarks/roofline.py of linvit's repository, on a machine with a GPU",
    "bench data": "Use benchmarks/loading.py of linvit's repository, which measures the same",
    "check --head": "Use a test of a few lines with linvit.create_segmentor or create_detector (tests/plugin has two)",
    "compare --budget": "Use equal epochs, --trainer.max_epochs=N, or a grid of variants with epochs of their own",
    "compare --level": "Use the curves in TensorBoard or metrics.csv, which say when a score is reached",
    "compare --search": "Use --tune OPTION=VALUE,VALUE, or a loop of Optuna around linvit fit (docs/guides/search.md)",
    "compare --trials": "Use --tune OPTION=VALUE,VALUE, or a loop of Optuna around linvit fit (docs/guides/search.md)",
    "doctor": "Use pip check, which names packages that do not fit, and python -m torch.utils.collect_env",
    "export --int8": "Use torchao on the network of linvit.load (docs/export.md, 8 bits)",
    "leaderboard": "Use linvit compare --report FOLDER..., which makes one table of the runs in all folders",
    "probe --epochs": "Use linvit probe without it: the linear classifier is trained to convergence",
    "verify-resume": "Use linvit fit --resume=auto: a run resumes exactly (docs/guides/train.md)",
}
"""What to use instead of a removed `VERB`, `VERB WORD`, `VERB --option`, or `--option` of all verbs: one line each.

An option may have one of its values, `VERB --option=value`, where only that is removed.
"""


def check_removed(argv: Sequence[str]) -> None:
    """Raises a `UserError` that names the replacement if a command has a removed verb or option."""
    for name in _names(argv):
        if name in REMOVED:
            raise UserError(f"{name if name.startswith('--') else f'linvit {name}'} was removed. {REMOVED[name]}")


def _names(argv: Sequence[str]) -> Iterator[str]:
    """Yields the keys that the table may have for a command, such as `bench`, `bench data` and `bench --level`."""
    verb, *words = argv or [""]
    yield verb
    for place, (word, following) in enumerate(zip(words, [*words, ""][1:], strict=True)):
        if not place or word.startswith("--"):
            for name in (word.partition("=")[0], word, f"{word}={following}"):
                yield f"{verb} {name}"
                yield name * name.startswith("--")
