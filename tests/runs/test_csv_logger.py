"""metrics.csv: rows, new columns, going on."""

import csv
import re

import pytest

from linvit.runs import loggers
from linvit.runs.folder import RunFolder
from linvit.runs.loggers import CsvLogger, RowCount


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_per_step_and_a_column_per_tag(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"loss": 2.0}, 0)
    logger.log_metrics({"lr": 0.5}, 0)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_metrics({"loss": 0.5, "val, top1": 0.25}, 2)
    logger.finalize("success")
    assert rows(tmp_path) == [
        {"step": "0", "loss": "2.0", "lr": "0.5", "val, top1": ""},
        {"step": "1", "loss": "1.0", "lr": "", "val, top1": ""},
        {"step": "2", "loss": "0.5", "lr": "", "val, top1": "0.25"},
    ]


def test_new_rows_are_appended_to_those_of_a_long_run(tmp_path, monkeypatch):
    """Lightning saves after every row: to write them all each time would take 0.25 s at 15,000 rows."""
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"loss": 0.0, "lr": 0.1}, 0)
    logger.save()
    with monkeypatch.context() as patch:
        patch.setattr(loggers, "rewriting", None)
        for step in (1, 2):
            logger.log_metrics({"loss": float(step)}, step)
            logger.save()
            assert [row["loss"] for row in rows(tmp_path)] == ["0.0", "1.0", "2.0"][: step + 1]
        logger.log_metrics({"loss": 30.0, "lr": 0.4}, 300)
        patch.setattr(csv.DictWriter, "writerows", cut)
        with pytest.raises(OSError, match="No space left"):
            logger.save()
    assert (tmp_path / "metrics.csv").read_text().endswith("\n30\n")
    logger.log_metrics({"loss": 4.0}, 301)
    logger.save()
    assert [(row["step"], row["lr"]) for row in rows(tmp_path)[2:]] == [("2", ""), ("300", "0.4"), ("301", "")]


def test_a_file_that_is_emptied_meanwhile_is_written_again(tmp_path):
    logger = CsvLogger(tmp_path)
    for step in (0, 1):
        logger.log_metrics({"loss": float(step)}, step)
        logger.save()
    (tmp_path / "metrics.csv").write_text("")
    logger.log_metrics({"loss": 2.0}, 2)
    logger.save()
    assert [row["loss"] for row in rows(tmp_path)] == ["0.0", "1.0", "2.0"]


def cut(writer, _):
    """As a full disk does."""
    writer.writer.writerow([30])
    raise OSError(28, "No space left on device")


def test_what_is_saved_is_in_the_file_and_what_follows_completes_it_at_once(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_metrics({"loss": 0.5}, 1)
    logger.save()
    assert [row["loss"] for row in rows(tmp_path)] == ["1.0", "0.5"]
    logger.log_metrics({"mean": 0.75}, 1)
    assert rows(tmp_path)[1] == {"step": "1", "loss": "0.5", "mean": "0.75"}
    again = CsvLogger(tmp_path, purge_step=2)  # a checkpoint amid an accumulation: the row of its step goes on
    again.log_metrics({"lr": 2.0}, 1)
    again.finalize("success")
    assert rows(tmp_path)[1] == {"step": "1", "loss": "0.5", "mean": "0.75", "lr": "2.0"}


def test_a_continued_run_drops_what_comes_again_and_keeps_the_rest(tmp_path):
    logger = CsvLogger(tmp_path)
    for step in range(6):
        logger.log_metrics({"loss": float(step)}, step)
    logger.finalize("failed")
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2")  # of 20, killed while it wrote
    again = CsvLogger(tmp_path, purge_step=4)
    again.log_metrics({"loss": 40.0, "new": 1.0}, 4)
    again.finalize("success")
    assert [(row["step"], row["loss"], row["new"]) for row in rows(tmp_path)] == [
        ("0", "0.0", ""),
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "3.0", ""),
        ("4", "40.0", "1.0"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize(
    ("damage", "kept", "said"),
    [
        (lambda text: text.replace(b"step,", b"stop,"), [], "has no column 'step'"),
        (lambda text: text.replace(b"1,1.0", b"1,\xff.0"), ["0", "2"], "line 3: 'utf-8' codec"),
        (lambda text: text.replace(b"1,1.0", b"1,1.0,7,7"), ["0", "2"], "it has 4 cells, and the first line 2"),
        (lambda text: text.replace(b"1,1.0", "\xb2,1.0".encode()), ["0", "2"], "is not a step"),
        (lambda text: text.replace(b"1,1.0", b"9" * 5000 + b",1.0"), ["0", "2"], "is not a step"),
        (lambda text: text.replace(b"1,1.0", b"1,a\x1b"), ["0", "2"], r"float: 'a\\x1b'"),
        (lambda text: text.replace(b"1,1.0", b'1,"1.0'), ["0", "2"], "unexpected end of data"),
        (lambda text: text.replace(b"1,1.0", b"1"), ["0", "2"], "1 of 3 rows of .* skipped"),
        (lambda text: text.replace(b"\r\n", b"\n").replace(b"step", b"\xef\xbb\xbfstep"), ["0", "1", "2"], None),
        (lambda text: b"", [], None),
    ],
)
def test_a_damaged_table_is_read_as_far_as_it_goes(damage, kept, said, tmp_path, recwarn):
    logger = CsvLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({"loss": float(step)}, step)
    logger.save()
    file = tmp_path / "metrics.csv"
    file.write_bytes(damage(file.read_bytes()))
    assert [str(step) for step, _ in RunFolder(tmp_path).curves.get("loss", [])] == kept
    again = CsvLogger(tmp_path, purge_step=3)
    again.log_metrics({"loss": 3.0}, 3)
    again.save()
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(step, f"{step}.0") for step in [*kept, "3"]]
    texts = [str(one.message) for one in recwarn]
    assert re.search(said, texts[0]) if said else texts == []


def test_rows_that_are_missing_are_named_when_a_run_is_resumed(tmp_path, recwarn):
    logger = CsvLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({"loss": float(step)}, step)
    logger.save()
    state = RowCount(logger).state_dict()
    RowCount(CsvLogger(tmp_path, purge_step=3)).load_state_dict(state)
    assert not recwarn.list
    (tmp_path / "metrics.csv").unlink()
    with pytest.warns(UserWarning, match="3 of the 3 rows that .* are missing"):
        RowCount(CsvLogger(tmp_path, purge_step=3)).load_state_dict(state)


def test_the_table_of_a_run_holds_its_curves(run):
    table = rows(run.folder)
    assert [int(row["step"]) for row in table] == list(range(20))
    assert all(row["train/loss"] and row["grad_norm"] and row["memory/host"] for row in table)
    assert [int(row["step"]) for row in table if row["val/score"]] == [9, 19]
    assert [int(row["step"]) for row in table if row["images/s"]] == [9, 19]
    assert {"data_wait", "val/top1", "val/top5", "val/loss", "rank/blocks.0.attn"} <= table[0].keys()
