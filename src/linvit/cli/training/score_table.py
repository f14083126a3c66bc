"""What `linvit validate` and `linvit test` print: the scores, over how many images, and what was published."""

import json
from collections.abc import Mapping
from typing import Any

from linvit.image_size import image_size
from linvit.model_info import model_info
from linvit.registry import backbones, parameters_of

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

    None unless the model is theirs: the backbone as named, its options the published ones, with its own attention, at
    the size of the number, with 1000 classes.

    Args:
        settings: Hyper-parameters of the task.
    """
    name, options = backbones.parse(settings["backbone"])
    facts = model_info().get(name)
    if facts is None or facts.top1 is None or settings["attention"] is not None or settings["num_classes"] != 1000:
        return None
    if image_size(settings["img_size"]) != (facts.img_size, facts.img_size):
        return None
    usual = parameters_of(backbones.get(name))
    changed = {option: given for option, given in options.items() if not _same(given, usual[option])}
    return (facts.top1 / 100, facts.top1_source) if not changed or _same(changed, facts.also) else None


def _same(given: Any, usual: Any) -> bool:
    """Whether two options are equal, as lists or tuples."""
    return json.dumps(given, default=repr) == json.dumps(usual, default=repr)


def _place(tag: str) -> tuple[bool, int, str]:
    name = tag.rpartition("/")[2]
    bare = name.removeprefix("ema_")
    return name != bare, ORDER.index(bare) if bare in ORDER else len(ORDER), bare
