"""What `validate` and `test` print."""

from linvit.runs.endings import score_table
from linvit.tasks.published import PublishedScores


def test_the_rows_are_in_order_and_the_published_number_stands_beside_ours():
    scores = {"test/loss": 0.75, "test/ema_top1": 0.8125, "test/top1": 0.8, "test/top5": 0.9, "test/score": 0.8}
    assert score_table(scores, "50000 images", PublishedScores({"top1": 0.812}, "their README")).splitlines() == [
        "50000 images; published: their README",
        "                     ours         published",
        "  test/score         0.8",
        "  test/top1          0.8          0.8120",
        "  test/top5          0.9",
        "  test/loss          0.75",
        "  test/ema_top1      0.8125       0.8120",
    ]


def test_a_command_prints_it(run):
    done = run.then("test")
    lines = done.out.splitlines()
    assert "360 images" in lines
    assert [line.split()[0] for line in lines if line.startswith("  test/")] == [
        f"test/{name}" for name in ("score", "top1", "top5", "loss")
    ]
    assert (run.folder / "test_classes.csv").is_file()
    assert (run.folder / "test_confusion.png").is_file()
