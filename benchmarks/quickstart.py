"""Test top-1 of every attention in the quickstart: same backbone, data, recipe and seed; only the attention changes.

Example:
    $ python benchmarks/quickstart.py --epochs 57 > benchmarks/quickstart-DATE.md
    $ python benchmarks/quickstart.py --attentions soft hydra
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import linvit

CONFIG = Path(__file__).parent.parent / "configs/quickstart.yaml"


def main() -> None:
    """Trains and tests one attention after the other; prints a line of a Markdown table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attentions", nargs="+", default=linvit.list_attentions(), metavar="NAME")
    parser.add_argument("--epochs", type=int, default=57)
    args = parser.parse_args()
    print("| attention | epochs | test top-1 |\n|---|---|---|", flush=True)
    for attention in args.attentions:
        print(f"| {attention} | {args.epochs} | {top1(attention, args.epochs):.4f} |", flush=True)


def top1(attention: str, epochs: int) -> float:
    """Test accuracy of the moving average in the epoch with its best validation score."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "quickstart/version_0"
        quiet = ["--trainer.enable_progress_bar=false", "--trainer.callbacks=null"]
        options = [f"--model.attention={attention}", f"--trainer.max_epochs={epochs}"]
        linvit_verb("fit", "--config", CONFIG, *quiet, *options, f"--trainer.default_root_dir={folder}")
        best = run / "checkpoints/best_ema.ckpt"
        shown = linvit_verb("test", "--config", run / "config.yaml", "--ckpt_path", best)
        score = re.search(r"test/ema_top1\s+([\d.]+)", shown)
        assert score is not None, shown
        return float(score[1])


def linvit_verb(*arguments: str | Path) -> str:
    """What a linvit command prints; raises if it fails."""
    command = [sys.executable, "-m", "linvit", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
