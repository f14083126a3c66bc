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
