"""The table of docs/export.md: what 8 bits cost every attention in the digits' test score, and save in bytes and time.

    python benchmarks/int8.py --attentions softmax focused mlla
    python benchmarks/int8.py --epochs 10

Each starts from the weights of one softmax network (`linvit fit --config linearize/teacher`, trained if there is none),
and learns the labels for some epochs. Runs stay in checkpoints/int8: the same command continues.
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

import torch

import linvit
from linvit.cli import main as command
from linvit.experiments.measure import interleaved
from linvit.inference.description import build_task, read_trained
from linvit.inference.export import Export
from linvit.inference.quantize import quantise_file
from linvit.runs.folder import RunFolder
from linvit.runs.run import Run

TEACHER = Path("checkpoints/linearize/teacher")
ROOT = "--trainer.default_root_dir"
BATCH = 16
BUDGET = 1.0  # seconds of timing


def main() -> None:
    """Trains and exports one attention after the other; prints a line of a Markdown table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attentions", nargs="+", default=linvit.list_attentions(), metavar="NAME")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    print("| attention | float32 | 8 bits | difference | kB | kB in 8 bits | time |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    if not TEACHER.exists():
        trained("--config=linearize/teacher")
    options = ["--model.teacher.attention_weight=0", "--model.lr=2e-3", f"--trainer.max_epochs={args.epochs}"]
    for name in args.attentions:
        root = Path(f"checkpoints/int8/{name}-{args.epochs}")
        run = root / "quickstart" / "version_0"
        if not (run.exists() and RunFolder(run).complete):
            trained("--config=linearize/quickstart", f"--model.attention={name}", *options, f"{ROOT}={root}")
        print(f"| `{name}` | {' | '.join(row(run))} |", flush=True)


def trained(*options: str) -> None:
    """Trains a run; what it says goes to stderr."""
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.callbacks=null", "--resume=auto"]
    with contextlib.redirect_stdout(sys.stderr):
        if code := command(["fit", *options, *quiet]):
            raise SystemExit(code)


@torch.no_grad()
def row(folder: Path) -> list[str]:
    """Scores, sizes and the ratio of times, each before and after."""
    description, state = read_trained(folder)
    task = build_task(description, state, folder)
    export = Export(task.network, description)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "model.onnx")
        run = export.write(file)
        done = quantise_file(file, export, run, task, Run.read(folder, "test").data)
    images = export.images(BATCH, export.size)
    times = interleaved({"float": lambda: run(images), "8 bits": lambda: done.run(images)}, budget=BUDGET)
    sizes = (f"{size / 1000:.0f}" for size in done.sizes)
    before, after = done.scores
    ratio = times["8 bits"].over(times["float"])
    return [f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}", *sizes, f"{ratio:.2f}"]


if __name__ == "__main__":
    main()
