"""What `linvit validate` and `linvit test` print: the scores, over how many images, and what was published."""

from collections.abc import Mapping

from linvit.tasks.published import PublishedScores


def score_table(scores: Mapping[str, float], images: int, known: PublishedScores | None) -> str:
    """The scores, those of the moving average after those of the weights, and the published ones beside ours.

    Args:
        scores: By tag, such as test/loss or test/ema_loss, in the order in which the task logs them.
        images: How many images they are over.
        known: The published scores, if there are any to compare with.
    """
    lines = [f"{images} images" + (f"; published: {known.source}" if known else "")]
    lines.append(f"  {'':<18} {'ours':<12} {'published' if known else ''}".rstrip())
    for tag in sorted(scores, key=_place):
        score = known.scores.get(_name(tag)) if known else None
        beside = "" if score is None else f"{score:.4f}"
        lines.append(f"  {tag:<18} {scores[tag]:<12.7g} {beside}".rstrip())
    return "\n".join(lines)


def _name(tag: str) -> str:
    """The name of the metric."""
    return tag.rpartition("/")[2].removeprefix("ema_")


def _place(tag: str) -> tuple[bool, int]:
    """The weights before their average; of each, the score first and the loss last."""
    return "/ema_" in tag, {"score": 0, "loss": 2}.get(_name(tag), 1)
