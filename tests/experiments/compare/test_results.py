"""From the files of runs to a table and a report."""

import csv
import html
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from PIL import Image

from linvit import UserError
from linvit.callbacks.report import write_table
from linvit.experiments.compare import report, tables
from linvit.experiments.compare.costs import Costs
from linvit.experiments.compare.results import Results, check_comparable, group, with_published, with_teachers
from linvit.experiments.compare.statistics import wilson
from linvit.runs import result
from linvit.runs.folder import RunFolder, find
from linvit.tasks.published import PublishedScores
from tests.experiments.compare.runs import write_run

NUMBERS = {
    "parameters": 1,
    "macs": 2,
    "latency_seconds": 3.0,
    "latency_low": 3.0,
    "latency_high": 3.0,
    "memory_bytes": 4,
}


def results(folder, **options):
    variants = group(find([folder]))
    for variant in variants:
        variant.published = {"softmax": 72.2}.get(variant.name)
    return Results("x", variants, options.pop("baseline", "softmax"), None, ["model.attention"], "Table 4")


def csv_rows(found, folder):
    write_table(folder / "table.csv", tables.numbers(found))
    with (folder / "table.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def folder(tmp_path):
    """Two variants, two seeds each, and a seed of one that has trained for half of its epochs."""
    for seed, (softmax, linear) in enumerate([(0.80, 0.70), (0.82, 0.74)]):
        write_run(tmp_path / f"softmax-seed{seed}/version_0", seed, (0.1, softmax))
        write_run(tmp_path / f"linear-seed{seed}/version_0", seed, (0.1, linear), attention="linear")
    write_run(tmp_path / "linear-seed2/version_0", 2, (0.3,), attention="linear")
    return tmp_path


def test_runs_that_differ_in_their_seed_alone_are_one_variant(folder):
    linear, softmax = group(find([folder]))
    assert (linear.name, softmax.name) == ("linear", "softmax")
    assert linear.scores(None) == {0: (0.70, 19, 2), 1: (0.74, 19, 2)}
    run = linear.runs[2].folder
    assert linear.trouble == {
        2: f"its last evaluation is that of epoch 1 of 2, step 10. Resume it with: linvit fit --config "
        f"{run}/config.yaml --resume=auto"
    }
    assert softmax.rank() == 47.0  # the last ones: 31 and 63
    assert results(folder).summary(softmax) == pytest.approx((0.81, math.sqrt(0.0002), 2))
    assert results(folder).differences()["linear"].mean == pytest.approx(-0.09)


def test_what_differs_besides_is_said(folder):
    assert results(folder).controls()[1] == {}
    assert report.controls(results(folder)).startswith("Controlled: the complete configurations of 5 runs differ only")
    write_run(folder / "linear-seed1/version_0", 1, (0.1, 0.74), attention="linear", lr=0.1)
    assert list(results(folder).controls()[1]) == ["model.lr"]
    assert "NOT controlled" in report.controls(results(folder))


def test_runs_of_different_tasks_are_refused(tmp_path):
    write_run(tmp_path / "a/version_0")
    write_run(tmp_path / "b/version_0", task="linvit.tasks.SegmentationTask")
    with pytest.raises(UserError, match=r"differ: linvit\.tasks\.ClassificationTask, linvit\.tasks\.Segm"):
        check_comparable(group(find([tmp_path])))
    with pytest.raises(UserError, match="contains no run"):
        find([tmp_path / "c"])


def test_both_tables_agree(folder):
    found = results(folder)
    rows = csv_rows(found, folder)
    assert [row["variant"] for row in rows] == ["linear", "softmax"]
    assert float(rows[0]["difference"]) == pytest.approx(-0.09)
    assert rows[0]["score_seed2"] == ""
    assert (rows[0]["score_seed1"], rows[0]["epoch_seed1"]) == ("0.74", "2")
    assert "epoch 1 of 2" in rows[0]["trouble"]
    markdown = tables.markdown(found).splitlines()
    assert markdown[0] == "**x**"
    assert markdown[4].startswith("| linear | 0.7200 ± 0.0283 | 2 | 2 (1 incomplete) | -0.0900 [-0.2171, +0.0371] |")
    assert markdown[5].endswith("| baseline | 0.8100 (2) | 47.0 | 72.2 |")


def test_an_average_that_is_mostly_its_start_is_said_and_the_raw_score_stands_beside_it(tmp_path):
    for name, decay in (("softmax", 0.99), ("linear", 0.5)):
        average = {"predict_with": "ema", "ema_decay": decay}
        run = write_run(tmp_path / f"{name}-seed0/version_0", scores=(0.5, 0.8), attention=name, **average)
        (run / "metrics.csv").write_text("step,epoch,val/score,val/ema_score\n9,0,0.5,0.1\n19,1,0.8,0.15\n")
    found = Results("x", group(find([tmp_path])), "softmax", None, ["model.attention"])
    assert found.untrained() == pytest.approx({"softmax": 0.99**20})
    markdown = tables.markdown(found)
    assert "| variant | val/ema_score | val/score | epoch |" in markdown
    assert "| softmax | 0.1500 | 0.8000 | 2 |" in markdown
    assert "untrained start: softmax (82%). Compare the trained weights instead, by --score=val/score" in markdown
    assert not replace(found, score="val/score").untrained()


def test_stars_are_holms_and_all_tables_say_so(tmp_path):
    steps = {"softmax": (0.0, 0.0), "linear": (0.2, 0.001), "focused": (0.01, 0.006), "soft": (-0.01, -0.006)}
    for name, (shift, step) in steps.items():
        for seed in range(3):
            write_run(tmp_path / f"{name}-seed{seed}/version_0", seed, (0.1, 0.5 + shift + seed * step), attention=name)
    write_run(tmp_path / "pola-seed0/version_0", 0, (0.1, 0.9), attention="pola")
    found = Results("x", group(find([tmp_path])), "softmax", None, ["model.attention"])
    rows = {row["variant"]: row for row in csv_rows(found, tmp_path)}
    linear = {name: float(rows["linear"][name]) for name in ("interval_low", "p", "p_holm")}
    assert linear["interval_low"] > 0
    assert linear["p_holm"] == pytest.approx(3 * linear["p"])
    assert float(rows["focused"]["interval_low"]) > 0  # which alone would have earned a star
    assert rows["pola"]["p_holm"] == ""
    assert [name for name, row in rows.items() if row["star"] == "1"] == ["linear"]
    page = report.write(found, tmp_path, "cpu").read_text(encoding="utf-8")
    for text in (tables.markdown(found), html.unescape(page)):
        assert "by Holm's correction for all comparisons of the table; it takes at least 3 seeds" in text


def test_of_two_runs_with_one_seed_the_newer_one_counts(tmp_path):
    for number, score in {9: 0.9, 10: 0.1, 2: 0.2}.items():
        write_run(tmp_path / f"softmax/version_{number}", scores=(0, score))
    (softmax,) = group(find([tmp_path]))
    assert softmax.scores(None) == {0: (0.1, 19, 2)}


def test_the_best_score(tmp_path):
    for seed, scores in enumerate([(0.5, 0.9, 0.8), (0.6, 0.7, 0.65)]):
        write_run(tmp_path / f"softmax-seed{seed}/version_0", seed, scores, epochs=3)
    found = Results("x", group(find([tmp_path])), "softmax", None, [])
    title, _, header, _, row, *_ = tables.markdown(found).splitlines()
    assert title == "**x**"
    assert header.endswith("| best (epoch) | rank |")
    assert row.endswith("| 0.8000 (2) | 46.0 |")
    assert float(csv_rows(found, tmp_path)[0]["best_mean"]) == 0.8
    step, mean, deviation = report.mean_curve(found.variants[0], found, None)[-1]
    assert (step, mean, deviation) == pytest.approx((29, 0.725, 0.15 / 2**0.5))
    loss = replace(found, score="train/loss")
    for run in loss.variants[0].runs.values():
        run.curves["train/loss"] = [(step, 1 - value) for step, value in run.curves["val/score"]]
    assert loss.best(loss.variants[0]) == (pytest.approx(0.2), 2)  # the least


def test_tuned_values_are_columns_and_those_at_the_edge_are_named(tmp_path):
    for attention, lr in {"softmax": 0.002, "linear": 0.004}.items():
        write_run(tmp_path / f"{attention}-seed0/version_0", attention=attention, lr=lr)
    tuned = {"model.lr": [0.001, "2e-3", 4e-3]}
    found = Results("x", group(find([tmp_path])), "softmax", None, ["model.attention"], tuned=tuned)
    assert report.controls(found).endswith("differ only in model.attention, model.lr, and in their seed.")
    markdown = tables.markdown(found)
    assert "| variant | model.lr (tuned) | val/score |" in markdown
    assert "| linear | 0.004 | 0.7500 |" in markdown
    assert "of 0.001, 2e-3, 0.004 each variant has the value with the best val/score in one run" in markdown
    assert "a better value may lie: linear." in markdown
    assert [row["model.lr"] for row in csv_rows(found, tmp_path)] == ["0.004", "0.002"]


def test_a_row_is_compared_with_the_one_of_its_own_difficulty(tmp_path):
    scores = {("softmax", 8): 1.0, ("linear", 8): 0.9, ("softmax", 32): 0.8, ("linear", 32): 0.3, ("linear", 99): 0.1}
    for (attention, pairs), score in scores.items():
        run = write_run(tmp_path / f"{attention}-pairs{pairs}-seed0/version_0", 0, (0.0, score), attention=attention)
        config = yaml.safe_load((run / "config.yaml").read_text()) | {"data": {"init_args": {"pairs": pairs}}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    keys = ["model.attention", "data.pairs"]
    found = Results("x", group(find([tmp_path])), "softmax-pairs8", None, keys)
    assert found.references == {
        "linear-pairs8": "softmax-pairs8",
        "linear-pairs32": "softmax-pairs32",
        "linear-pairs99": "softmax-pairs8",  # there is none of its own
    }
    assert found.differences()["linear-pairs32"].mean == pytest.approx(-0.5)
    markdown = tables.markdown(found)
    assert "| difference [95 % interval] |" in markdown
    assert "| linear-pairs32 | 0.3000 | 2 | 1 | -0.5000 from softmax-pairs32 |" in markdown
    assert "| softmax-pairs32 | 0.8000 | 2 | 1 | reference |" in markdown
    assert {row["variant"]: row["reference"] for row in csv_rows(found, tmp_path)}["softmax-pairs32"] == ""
    alone = Results("x", [one for one in found.variants if "linear" in one.name], "linear-pairs8", None, keys)
    assert set(alone.references.values()) == {"linear-pairs8"}


def test_a_score_that_is_not_finite_makes_its_seed_incomplete(tmp_path):
    scores = {
        ("softmax", 0): (0.5, 0.6),
        ("softmax", 1): (0.5, 0.7),
        ("linear", 0): (0.6, "nan"),
        ("linear", 1): (1, 0),
    }
    for (name, seed), values in scores.items():
        write_run(tmp_path / f"{name}-seed{seed}/version_0", seed, values, attention=name)
    table = tmp_path / "softmax-seed1/version_0/metrics.csv"  # whose last validation has no val/loss
    table.write_text("step,epoch,val/score,val/loss\n9,0,0.5,0.1\n19,1,0.7,\n")
    found = Results("x", group(find([tmp_path])), "softmax", None, ["model.attention"])
    assert found.trouble == {("linear", 0): "its last val/score is nan"}
    assert found.differences()["linear"].pairs == 1
    assert found.best(found.variants[0]) == (1, 1)  # of seed 1, as the score
    assert "| 1 (1 incomplete) |" in tables.markdown(found)
    loss = replace(found, score="val/loss")
    assert loss.trouble["softmax", 1] == "its last evaluation has no val/loss"
    assert not any(variant.scores("val/loss") for variant in loss.variants)


def test_a_name_cannot_break_a_table(tmp_path):
    names = ["[2pt] & 100% \\\\ $x_1$", "a|b\x1b]0;pwn\x07\u202e", os.fsdecode(b"no text \xff")]
    for number, name in enumerate(names):
        write_run(tmp_path / "run/version_0", attention=f"a{number}")
        (tmp_path / "run").rename(tmp_path / f"{name}-seed0")
    found = Results("x", group(find([tmp_path])), r"no text \udcff", None, ["model.attention"])
    assert r"| a\|b\x1b]0;pwn\x07\u202e | 0.75" in tables.markdown(found)
    report.write(found, tmp_path, "cpu")
    for path in tmp_path.glob("*.*"):
        if path.is_file() and path.suffix != ".png":
            assert not {"\x1b", "\x07", "\u202e"} & {*path.read_text(encoding="utf-8")}, path.name


def test_the_page_has_all_of_it(folder):
    (folder / "softmax-seed0/version_0/attention_maps").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "linear-seed0/version_0/val_confusion.png")
    page = report.write(results(folder), folder, "cpu").read_text(encoding="utf-8")
    for text in ("Controlled:", "model.attention", "0.7200 ± 0.0283", "not ours", "epoch 1 of 2", "val_confusion"):
        assert text in page
    assert "Attention maps" not in page
    assert page.count("data:image/svg+xml") == 3  # curves of the score and of the rank, and the ranks of all layers
    assert {path.name for path in folder.glob("*.*")} == {
        *("table.md", "table.csv", "score_curves.svg", "rank_curves.svg", "ranks.png", "report.html")
    }


def test_score_over_the_option_that_is_a_number(tmp_path):
    for attention, scores in {"hydra": (0.4, 0.1), "softmax": (1.0, 0.9)}.items():
        for lr, score in zip((1e-3, 8e-3), scores, strict=True):
            run = tmp_path / f"lr{lr}-{attention}-seed0/version_0"
            write_run(run, 0, (0.0, score), attention=attention, lr=lr, score="aAcc")
            (run / "val_classes.csv").write_text("class,pixels\n0,30\n1,70\n")
    found = results(tmp_path, baseline="lr0.001-softmax")
    (drawing,) = report.difficulty_plots(found, "here").values()
    words = [text for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawing) if not text.startswith("0.")]
    assert {"lr (log scale)", "chance", "ceiling"} <= {*words}
    assert sorted(text for text in words if text in ("softmax", "hydra")) == [
        "hydra",
        "softmax",
    ]  # once, not in a legend
    assert report.difficulty_plots(replace(found, variants=found.variants[:1]), "here") == {}


def test_the_authors_scores_of_the_very_model_stand_beside_ours(folder):
    found = replace(results(folder), source="")
    for variant in found.variants:
        published = PublishedScores({"top1": 0.722}, "their README") if variant.name == "softmax" else None
        variant.published, variant.costs = None, Costs(NUMBERS, published)
    labelled = with_published(found)
    assert labelled.source == "top1 in per cent (their README)"
    assert [variant.published for variant in labelled.variants] == [None, 72.2]
    assert "72.2" in tables.markdown(labelled)


def test_intervals_over_images_are_those_of_the_scored_evaluation_and_paired(tmp_path):
    right = {"softmax": {0: 80, 1: 80}, "linear": {0: 70, 1: 60}, "focused": {0: 90}}
    for name, seeds in right.items():
        for seed, count in seeds.items():
            run = write_run(tmp_path / f"{name}-seed{seed}/version_0", seed, (0.1, count / 100), attention=name)
            shown = 100 - count if name == "focused" else count  # of another evaluation, as of the best weights
            rows = [f"{i},{i % 10},{(i + (i >= shown)) % 10}" for i in range(100)]
            (run / "val_images.csv").write_text("\n".join(["image,label,raw", *rows]))
    found = Results("x", group(find([tmp_path])), "softmax", None, ["model.attention"])
    rows = {row["variant"]: row for row in csv_rows(found, tmp_path)}
    assert (rows["softmax"]["images_low"], rows["softmax"]["images_high"]) == tuple(map(str, wilson(0.8, 100)))
    linear = [float(rows["linear"][f"{of}images_{end}"]) for of in ("", "difference_") for end in ("low", "high")]
    deviation = np.array([1.0] * 60 + [0.5] * 10 + [0.0] * 30).std() / 10
    assert linear[:2] == pytest.approx([0.65 - 1.96 * deviation, 0.65 + 1.96 * deviation], abs=0.01)
    paired = np.array([0.0] * 60 + [0.5] * 10 + [1.0] * 10 + [0.0] * 20).std() / 10  # less than of two samples
    assert linear[2:] == pytest.approx([-0.15 - 1.96 * paired, -0.15 + 1.96 * paired], abs=0.01)
    assert rows["focused"]["images_low"] == ""
    assert "| [0.7112, 0.8666] |" in tables.markdown(found)
    assert "10,000 bootstrap samples of the images" in tables.markdown(found)


def test_what_evaluate_has_found_of_runs_are_columns(folder):
    for seed, top1 in enumerate((0.5, 0.7)):
        run = RunFolder(folder / f"softmax-seed{seed}/version_0")
        result.write(run.folder / "result.json", result.derive(run) | {"evaluation": {"v2": top1, "v2 64x64": 0.9}})
    found = results(folder)
    assert "| top-1 on v2 | top-1 on v2 64x64 |" in tables.markdown(found)
    assert "| 0.6000 ± 0.1414 | 0.9000 ± 0.0000 |" in tables.markdown(found)
    rows = csv_rows(found, folder)
    assert [(row["top1_v2"], row["top1_v2 64x64"]) for row in rows] == [("", ""), ("0.6", "0.9")]


def test_parts_of_an_option_are_shown_as_one(tmp_path):
    write_run(tmp_path / "a/version_0", attention={"name": "focused", "dwc": False})
    write_run(tmp_path / "a/version_1", attention="softmax")
    found = Results("x", group(find([tmp_path])), "attention=softmax", None, ["model.attention"])
    assert [variant.name for variant in found.variants] == ["attention=focused, dwc=False", "attention=softmax"]
    assert report.controls(found).endswith("differ only in model.attention, and in their seed.")


STARTS = [(0.5, 0.2, 0.8), (0.6, 0.4, 0.9)]  # start, distance and score of each seed


def test_a_teacher_is_a_row_and_the_baseline_of_its_students(tmp_path):
    columns = "step,epoch,teacher/score,start/score,start/distance/a,start/distance/b,distance/a,distance/b,val/score"
    for seed, (start, distance, score) in enumerate(STARTS):
        run = write_run(
            tmp_path / f"linear-seed{seed}/version_0", seed, attention="linear", teacher={"source": "t.ckpt"}
        )
        rows = [f"0,,0.95,{start},1,2,,,", f"9,0,,,,,1,1,{score - 0.1}", f"19,1,,,,,{distance},{distance},{score}"]
        (run / "metrics.csv").write_text("\n".join([columns, *rows]))
    found = with_teachers(Results("x", group(find([tmp_path])), "", None, ["model.attention"]))
    assert found.baseline == "teacher"
    assert found.teachers == {"linear": "teacher"}
    _, _, header, _, teacher, student, *_ = tables.markdown(found).splitlines()
    assert header.startswith("| variant | before any step | val/score | epoch | seeds | difference from teacher")
    assert teacher == "| teacher | - | 0.9500 | - | - | baseline | - | - | - |"
    assert student.startswith("| linear | 0.5500 ± 0.0707 | 0.8500 ± 0.0707 | 2 | 2 | -0.1000 [")
    assert student.endswith("| 1.5000 ± 0.0000 | 0.3000 ± 0.1414 |")
    rows = csv_rows(found, tmp_path)
    assert [float(rows[1][name]) for name in ("before_mean", "distance_before", "distance")] == pytest.approx(
        [0.55, 1.5, 0.3]
    )
    for variant, costs in zip(found.variants, (Costs(NUMBERS, None), None), strict=True):
        variant.costs = costs
    assert len({len(row) for row in tables.numbers(found)}) == 1  # all columns in all rows
    chosen = with_teachers(Results("x", group(find([tmp_path])), "linear", None, ["model.attention"]))
    assert chosen.baseline == "linear"
