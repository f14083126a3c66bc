"""What `linvit validate` and `linvit test` print: the scores, over how many images, and what was published."""

from collections.abc import Mapping
from typing import Any

from linvit.image_size import image_size
from linvit.model_facts import model_facts

ORDER = ("score", "top1", "top5", "loss")  # of the rows; others follow


def score_table(scores: Mapping[str, float], images: int, known: tuple[float, str] | None) -> str:
    """The scores, those of the moving average after those of the weights, and the published top-1 beside ours.

    Args:
        scores: By tag, such as test/top1 or test/ema_top1.
        images: How many they are over.
        known: Published top-1 in [0, 1] and its source, if there is one to compare with.
    """
    lines = [f"{images} images" + (f"; published: {known[1]}" if known else "")]
    lines.append(f"  {'':<18} {'ours':<12} {'published' if known else ''}".rstrip())
    for tag in sorted(scores, key=_place):
        beside = f"{known[0]:.4f}" if known and tag.rpartition("/")[2] in ("top1", "ema_top1") else ""
        lines.append(f"  {tag:<18} {scores[tag]:<12.7g} {beside}".rstrip())
    return "\n".join(lines)


def published(settings: Mapping[str, Any]) -> tuple[float, str] | None:
    """The top-1 on ImageNet-1K in [0, 1] that the authors of a backbone published, and where.

    None unless the model is theirs: the backbone as named, with its own attention, at the size of the number, with 1000
    classes.

    Args:
        settings: Hyper-parameters of the task.
    """
    backbone = settings["backbone"]
    name, options = (backbone, {}) if isinstance(backbone, str) else (backbone["name"], {**backbone})
    if set(options) - {"name"} or settings["attention"] is not None or settings["num_classes"] != 1000:
        return None
    facts = model_facts().get(name)
    if facts is None or facts.top1 is None or image_size(settings["img_size"]) != (facts.img_size, facts.img_size):
        return None
    return facts.top1 / 100, facts.top1_source


def _place(tag: str) -> tuple[bool, int, str]:
    name = tag.rpartition("/")[2]
    bare = name.removeprefix("ema_")
    return name != bare, ORDER.index(bare) if bare in ORDER else len(ORDER), bare
