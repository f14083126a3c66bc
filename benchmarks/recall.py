"""docs/results/recall.md and recall.svg: what all attentions recall of few and of many pairs.

    make diagnostics PAIRS=8,32 SEEDS=3 JOBS=2
    python benchmarks/recall.py --attention softmax,linear --pairs 4,8 --seeds 1 --output OUT

With the fewest pairs each attention gets the best of three learning rates, and keeps it with more. The same command
continues where it was interrupted. The page has a row per attention and a column per number of pairs; each line of the
picture leads from the most pairs to the fewest.
"""

import argparse
import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import yaml
from gallery import has_convolution
from matplotlib.figure import Figure

from linvit.cli import main as linvit
from linvit.experiments.plots import COLOURS, STYLE, svg
from linvit.io.plain_text import markdown_table
from linvit.runs.conditions import conditions
from linvit.runs.folder import OUTCOME

CHANCE = 1 / 16  # of 16 values
FOLDERS = [Path("checkpoints", "compare", name) for name in ("diagnostics-rates", "diagnostics")]
"""Of the runs with the fewest pairs, and of those with more."""
PAGE = """# Recall of each attention

`make diagnostics PAIRS={pairs} SEEDS={seeds}`; {where}

The task is associative recall (Arora et al. 2023, "Zoology") on a grid: tokens at random positions hold pairs of a key
and a value, as many tokens ask for the value of a key, and the network predicts which of 16 values it is. Networks
have two blocks, width 64 and two heads, and train for 600 steps of 32 new images. The score is the fraction of correct
answers on 1,000 images. Each attention has the best of three learning rates, chosen with {few} pairs on other images
and with another seed; if several are equal, the middle one.

![Fraction of correct answers of each attention, with few and with many pairs](recall.svg)

{table}

Score: last evaluation{spread}; chance is {chance:.2f}. Rate: chosen learning rate. C: contains a
convolution. State: numbers that attention keeps of all keys and values of an image, in float32, both layers: sums of
features and values if it has thin factors, otherwise keys and values. Rank: of the attention matrix, mean over layers
and heads; a mechanism without a matrix of tokens has none. State and rank are for {most} pairs, {tokens} tokens.

**Limits.** 600 steps show how much an attention learns quickly, not how much it can store: more steps, another learning
rate or another width change scores by tenths, and the learning rate that is best with {few} pairs may not be best with
{most}. Convolutions and positions in the attention help if neighbours matter. Here positions are random, and they
hinder.
"""

Rows = Mapping[str, Mapping[int, Mapping[str, str]]]
"""What the table says of an attention, by its number of pairs."""


def compare(attention: str, pairs: list[int], seeds: int, jobs: int) -> Rows:
    """Trains what is missing; returns what it amounts to, the best first."""
    few, *more = pairs
    common = [f"--seeds={seeds}", f"--jobs={jobs}", "--trainer.check_val_every_n_epoch=6"]
    tuned, root = FOLDERS
    given = ["--config=diagnostics/recall", f"--model.attention={attention}", f"--data.pairs={few}"]
    code = linvit(
        ["compare", *given, "--tune=model.lr=1e-3,2e-3,4e-3", "--skip_costs", f"--name={tuned.name}", *common]
    )
    if code:
        sys.exit(code)
    first = read(tuned / "table.csv")
    rates = {name: {"model.attention": name, "model.lr": float(row["model.lr"])} for name, row in first.items()}
    grid = {"config": "diagnostics/recall", "variants": rates, "vary": {"data.pairs": more}}
    (tuned / "more_pairs.yaml").write_text(yaml.safe_dump(grid, sort_keys=False), encoding="utf-8")
    code = linvit(["compare", str(tuned / "more_pairs.yaml"), f"--name={root.name}", *common])
    if code:
        sys.exit(code)
    others = read(root / "table.csv")
    found = {name: {few: row} | {many: others[f"{name}-pairs{many}"] for many in more} for name, row in first.items()}
    return dict(sorted(found.items(), key=lambda item: -float(item[1][more[-1]]["mean"])))


def read(table: Path) -> dict[str, dict[str, str]]:
    """The rows of the table of a comparison, by variant."""
    with table.open(encoding="utf-8", newline="") as file:
        return {row["variant"]: row for row in csv.DictReader(file)}


def page(rows: Rows, where: str) -> str:
    """The text of the page; `where` says on what the runs were trained."""
    amounts = sorted({pairs for found in rows.values() for pairs in found})
    most, seeds = amounts[-1], max(int(row["seeds"]) for found in rows.values() for row in found.values())
    lines = [["attention", "", *(f"{pairs} pairs" for pairs in amounts), "rate", "state (KiB)", "rank"]]
    for name, found in rows.items():
        scores = [_score(found[pairs]) for pairs in amounts]
        rate = found[amounts[0]]["model.lr"]
        state, rank = float(found[most]["state_bytes"]) / 1024, found[most]["rank"]
        mark = "C" * has_convolution(name)
        lines.append([name, mark, *scores, rate, f"{state:.1f}", f"{float(rank):.1f}" if rank else "-"])
    return PAGE.format(
        pairs=",".join(map(str, amounts)),
        where=where,
        few=amounts[0],
        seeds=seeds,
        table=markdown_table(lines),
        spread=", mean ± standard deviation over seeds" * (seeds > 1),
        chance=CHANCE,
        most=most,
        tokens=2 * most,
    )


def _score(row: Mapping[str, str]) -> str:
    deviation = row["standard_deviation"]
    return f"{float(row['mean']):.3f}" + (f" ± {float(deviation):.3f}" if deviation else "")


def picture(rows: Rows) -> str:
    """The text of the picture."""
    names = list(rows)[::-1]
    with mpl.rc_context(STYLE):
        figure = Figure((9, 0.24 * len(names) + 1.2))
        axes = figure.subplots()
        for i, name in enumerate(names):
            few, *_, many = [float(row["mean"]) for _, row in sorted(rows[name].items())]
            axes.plot([many, few], [i, i], color="#cccccc", linewidth=2, zorder=1)
            axes.plot(few, i, color=COLOURS[1], marker="o", markerfacecolor="none", linestyle="none")
            axes.plot(many, i, color=COLOURS[0], marker="o", linestyle="none")
        axes.axvline(CHANCE, color="#000000", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.7, len(names) + 0.4)
        axes.set_xlim(0, 1.02)
        axes.set_xlabel("share of right answers")
        few, *_, many = sorted({pairs for found in rows.values() for pairs in found})
        top = len(names) - 0.3
        axes.text(CHANCE, top, "chance", ha="center")
        axes.text(0.62, top, f"{many} pairs", color=COLOURS[0], ha="center")
        axes.text(0.8, top, f"{few} pairs", color=COLOURS[1], ha="center")
        return svg(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="*", help="names and patterns (*)")
    parser.add_argument("--pairs", default="8,32", help="numbers of pairs, two at least (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of each attention (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("docs", "results"), help="to write to (%(default)s)")
    args = parser.parse_args()
    pairs = sorted({int(number) for number in args.pairs.split(",")})
    if len(pairs) < 2:
        parser.error(f"--pairs must be two different numbers at least, such as 8,32; got {args.pairs}")
    table = compare(args.attention, pairs, args.seeds, args.jobs)
    known = conditions()
    ended = [json.loads(file.read_text(encoding="utf-8")) for name in FOLDERS for file in name.rglob(OUTCOME)]
    minutes = sum(run["seconds"] for run in ended) / args.jobs / 60
    where = f"{len(ended)} runs, {minutes:.0f} minutes, {args.jobs} at a time; {known['machine']}; {known['versions']}"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "recall.md").write_text(page(table, where), encoding="utf-8")
    (args.output / "recall.svg").write_text(picture(table), encoding="utf-8")
    print(args.output / "recall.md")
