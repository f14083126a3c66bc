"""README's pictures and tables anew: all registered attentions on the embedded digits, and their time over the tokens.

    make gallery EPOCHS=20 SEEDS=3 JOBS=2
    python benchmarks/gallery.py --attention softmax,linear --epochs 1 --seeds 1 --grids 4,8 --budget 1 --output OUT

The runs are those of `linvit compare ablations/all_attentions`: the same command goes on where it was interrupted, and
more seeds later add runs. Another number of epochs is another experiment, so it needs another --name.
"""

import argparse
import shutil
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from linvit.cli import main as linvit
from linvit.experiments.bench.conditions import conditions
from linvit.experiments.compare.experiment import Experiment

LINE = 22  # pixels
MARKS = ("<!-- gallery -->", "<!-- /gallery -->")
README = """# Gallery

`{command}`

{conditions}. The digits are the 1,797 handwritten ones that come with linvit, the backbone is `deit_nano` (64 tokens).

{table}
Score: of the validation set after {epochs} epochs, mean ± standard deviation over the seeds; a star marks a difference
whose 95 % confidence interval (paired t-test) leaves out zero. The quickstart has 57 epochs: fewer say how fast an
attention learns, not how far it comes. Latency: of one image in a batch of two. Memory: what a forward and a backward
pass of two images allocate. Rank: of the attention matrices, mean over layers and heads.

![score over latency](score_over_latency.svg)
![rank of each layer](ranks.png)
![what the central token sees](maps.png)
![time of a forward pass over the number of tokens](forward_time.svg)

{crossovers}"""


def main() -> int:
    """Trains what is missing, measures, and writes the folder; returns an exit code."""
    args = _arguments()
    root = Path("checkpoints", "compare", args.name)
    code = linvit([
        "compare", "ablations/all_attentions", "--config", "quickstart", f"--model.attention={args.attention}",
        f"--trainer.max_epochs={args.epochs}", f"--model.warmup_epochs={min(3, args.epochs / 2)}",
        f"--seeds={args.seeds}", f"--jobs={args.jobs}", f"--name={args.name}",
    ])  # fmt: skip
    experiment = Experiment.of(root.absolute())
    if code or experiment is None:
        return code or 1
    runs = {variant.name: variant.runs[0].folder for variant in experiment.results().variants}
    checkpoints = [str(run / "checkpoints" / "best_ema.ckpt") for run in runs.values()]
    bench, analysis = root / "bench", root / "analysis"
    timed = ["--forward_only", "--cpu_time", "--threads=1", f"--grids={args.grids}", f"--budget={args.budget}"]
    code = linvit(["bench", "attention", *runs, *timed, f"--output={bench}"])
    code = code or linvit(["analyze", "--ckpt_path", *checkpoints, "--count=1", f"--output={analysis}"])
    if code:
        return code
    known = conditions()
    where = "{machine}; {date}".format(**known)
    args.output.mkdir(parents=True, exist_ok=True)
    for path in (root / "score_over_latency.svg", root / "ranks.png", bench / "forward_time.svg"):
        shutil.copy(path, args.output)
    pictures = {name: analysis / f"maps_{number}_weights.png" for number, name in enumerate(runs)}
    drawn = {name: picture for name, picture in pictures.items() if picture.exists()}  # xca has no map of tokens
    few = _stacked(drawn, where).quantize(256, Image.Quantize.MAXCOVERAGE)  # colours: a third of the bytes
    few.save(args.output / "maps.png", optimize=True)
    crossovers = (bench / "costs.md").read_text(encoding="utf-8").partition("## Crossover")[2].partition("\n## ")[0]
    text = README.format(
        command=f"make gallery EPOCHS={args.epochs} SEEDS={args.seeds} JOBS={args.jobs}",
        conditions="; ".join(f"{name}: {value}" for name, value in known.items()),
        table=(root / "table.md").read_text(encoding="utf-8"),
        epochs=args.epochs,
        crossovers=f"## Crossover{crossovers}",
    )
    (args.output / "README.md").write_text(text, encoding="utf-8")
    if args.readme is not None:
        table = (root / "table.md").read_text(encoding="utf-8")
        link = f"[Columns, and more pictures]({args.output}/README.md)"
        note = f"Digits, {args.epochs} epochs, {args.seeds} seeds; {where}. {link}"
        _insert(args.readme, f"{table}\n{note}")
    print(args.output / "README.md")
    return 0


def _insert(page: Path, text: str) -> None:
    """Puts a text between the marks of the gallery in a page."""
    before, start, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        sys.exit(f"{page} has no {' ... '.join(MARKS)}, between which the table stands")
    page.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


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
    parser.add_argument("--readme", type=Path, help="a page that has the table, too, between marks (none)")
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
