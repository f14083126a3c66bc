"""docs/gallery: all registered attentions on the embedded digits, and their time over the tokens.

    make gallery EPOCHS=20 SEEDS=3 JOBS=2
    python benchmarks/gallery.py --attention softmax,linear --epochs 1 --seeds 1 --grids 4,8 --budget 1 --output OUT

The runs are those of `linvit compare ablations/all_attentions`: the same command continues where it was interrupted,
and more seeds later add runs. Another number of epochs is another experiment, so it needs another --name.
"""

import argparse
import shutil
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import nn

from linvit import create_backbone
from linvit.attention.jetvit import JetViTAttention
from linvit.cli import main as linvit
from linvit.experiments.compare.experiment import Experiment
from linvit.experiments.compare.results import Results
from linvit.experiments.compare.tables import notes, rows
from linvit.io.plain_text import markdown_table
from linvit.runs.conditions import conditions

LINE = 22  # pixels
README = """# Gallery: attentions on the digits

`{command}`

{conditions}. The dataset is the 1,797 handwritten digits that come with linvit (1,257 for training, 180 for
validation); the backbone is `deit_nano` (64 tokens).

**How to read the scores.** A schedule of {epochs} epochs on a few hundred images shows how fast a mechanism learns, not
its final score: see [the digits over a whole schedule](../results/digits.md) and
[recall](../results/recall.md). A mechanism with a convolution (marked C) uses neighbourhood
from the first step, and therefore learns faster. A star marks a difference from softmax that is
significant at 5 % by Holm's correction for all comparisons of the table, over at least three seeds.

{table}

{notes}

![score over latency](score_over_latency.svg)
![rank of each layer](ranks.png)
![what the central token sees](maps.png)
![time of a forward pass over the number of tokens](forward_time.svg)

{crossovers}"""


def main() -> int:
    """Trains what is missing, measures, and writes the folder; returns an exit code."""
    args = _arguments()
    code = linvit([
        "compare", "ablations/all_attentions", "--config", "quickstart", f"--model.attention={args.attention}",
        f"--seeds={args.seeds}", f"--jobs={args.jobs}", f"--name={args.name}",
        f"--trainer.max_epochs={args.epochs}", f"--model.warmup_epochs={min(3, args.epochs / 2)}",
    ])  # fmt: skip
    root = Path("checkpoints", "compare", args.name)
    experiment = Experiment.of(root.absolute())
    if code or experiment is None:
        return code or 1
    results = experiment.results()
    runs = {variant.name: variant.runs[0].folder for variant in results.variants}
    checkpoints = [str(run / "checkpoints" / "best_ema.ckpt") for run in runs.values()]
    bench, analysis = root / "bench", root / "analysis"
    timed = ["--forward_only", "--cpu_time", "--threads=1", f"--grids={args.grids}", f"--budget={args.budget}"]
    code = linvit(["bench", "attention", *runs, *timed, f"--output={bench}"])
    code = code or linvit(["analyze", "--ckpt_path", *checkpoints, "--count=1", f"--output={analysis}"])
    if code:
        return code
    known = conditions()
    args.output.mkdir(parents=True, exist_ok=True)
    for path in (root / "score_over_latency.svg", root / "ranks.png", bench / "forward_time.svg"):
        shutil.copy(path, args.output)
    pictures = {name: analysis / f"maps_{number}_weights.png" for number, name in enumerate(runs)}
    drawn = {name: picture for name, picture in pictures.items() if picture.exists()}  # xca has no map of tokens
    stacked = _stacked(drawn, "{machine}; {date}".format(**known))
    stacked.quantize(256, Image.Quantize.MAXCOVERAGE).save(
        args.output / "maps.png", optimize=True
    )  # a third of the bytes
    crossovers = (bench / "costs.md").read_text(encoding="utf-8").partition("## Crossover")[2].partition("\n## ")[0]
    text = README.format(
        command=f"make gallery EPOCHS={args.epochs} SEEDS={args.seeds} JOBS={args.jobs}",
        conditions="; ".join(f"{name}: {value}" for name, value in known.items()),
        table=_table(results),
        notes="\n\n".join(notes(results)),
        epochs=args.epochs,
        crossovers=f"## Crossover{crossovers}",
    )
    (args.output / "README.md").write_text(text, encoding="utf-8")
    print(args.output / "README.md")
    return 0


def _table(results: Results) -> str:
    """The table of the comparison with the marks of convolutions."""
    titles, *variants = rows(results)
    marked = [[name, "C" * has_convolution(name), *others] for name, *others in variants]
    return markdown_table([["variant", "", *titles[1:]], *marked])


def has_convolution(attention: str) -> bool:
    """Whether the layers of an attention have a convolution, which sees the neighbours of a token."""
    blocks = create_backbone("deit_nano", attention=attention).blocks
    return any(isinstance(module, nn.Conv1d | nn.Conv2d | JetViTAttention) for module in blocks.modules())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="*", help="names and patterns, softmax among them (*)")
    parser.add_argument("--epochs", type=int, default=20, help="of each run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of each attention (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    parser.add_argument("--grids", default="14,14x28,28,28x56,56,56x112,112", help="of the times (%(default)s)")
    parser.add_argument("--budget", type=float, default=60, help="seconds of timing (%(default)s)")
    parser.add_argument("--name", default="gallery", help="of the folder in checkpoints/compare (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("docs", "gallery"), help="to write to (%(default)s)")
    return parser.parse_args()


def _stacked(pictures: dict[str, Path], note: str) -> Image.Image:
    """Pictures below one another, each under its label, with a note at the end."""
    tiles = {label: Image.open(path).convert("RGB") for label, path in pictures.items()}
    height = sum(tile.height + LINE for tile in tiles.values()) + LINE
    whole = Image.new("RGB", (max(tile.width for tile in tiles.values()), height), "white")
    draw, font, top = ImageDraw.Draw(whole), ImageFont.load_default(13), 0
    for label, tile in tiles.items():
        draw.text((6, top + LINE / 2), label, "black", font, anchor="lm")
        whole.paste(tile, (0, top + LINE))
        top += tile.height + LINE
    draw.text((6, top + LINE / 2), note, "dimgrey", font, anchor="lm")
    return whole


if __name__ == "__main__":
    sys.exit(main())
