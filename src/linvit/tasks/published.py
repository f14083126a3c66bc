"""Scores that the authors of a model published, to compare ours with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linvit.image_size import image_size
from linvit.model_info import dense_info, model_info
from linvit.registry import Spec, backbones, heads
from linvit.signatures import equal_options, parameters_of


@dataclass(frozen=True)
class PublishedScores:
    """Scores of a model that its authors published, and where."""

    scores: Mapping[str, float]
    source: str


def published_top1(
    backbone: Spec, attention: Any, num_classes: int, img_size: int | Sequence[int]
) -> PublishedScores | None:
    """The top-1 accuracy on ImageNet-1K in [0, 1] that its authors published for this very model; else None."""
    name, options = backbones.parse(backbone)
    facts = model_info().get(name)
    if facts is None or facts.top1 is None or attention is not None or num_classes != 1000:
        return None
    changed = _changed(options, backbones.get(name))
    if image_size(img_size) != (facts.img_size, facts.img_size) or (changed and not equal_options(changed, facts.also)):
        return None
    return PublishedScores({"top1": facts.top1 / 100}, facts.top1_source)


def published_miou(
    backbone: Spec, head: Spec, attention: Any, num_classes: int, img_size: int | Sequence[int]
) -> PublishedScores | None:
    """The mean IoU on ADE20K in [0, 1], trained on crops of 512x512; see `published_top1`."""
    theirs = num_classes == 150 and image_size(img_size) == (512, 512)
    return _published(backbone, head, attention, "") if theirs else None


def published_ap(
    backbone: Spec, head: Spec, attention: Any, num_classes: int, decay_epochs: Sequence[float]
) -> PublishedScores | None:
    """The average precision on COCO in [0, 1], trained for as long; see `published_top1`."""
    schedule = {(8, 11): "1x", (27, 33): "3x"}.get(tuple(decay_epochs))  # type: ignore[arg-type]
    return _published(backbone, head, attention, schedule) if schedule and num_classes == 80 else None


def _published(backbone: Spec, head: Spec, attention: Any, schedule: str) -> PublishedScores | None:
    (name, options), (head_name, head_options) = backbones.parse(backbone), heads.parse(head)
    found = dense_info().get((name, head_name, schedule))
    if found is None or not found.scores or attention is not None or _changed(head_options, heads.get(head_name)):
        return None
    changed, theirs = (_changed(given, backbones.get(name)) for given in (options, found.options))
    return PublishedScores(found.scores, found.source) if equal_options(changed, theirs) else None


def _changed(options: Mapping[str, Any], constructor: Any) -> dict[str, Any]:
    """Those of some options that are not the constructor's defaults."""
    defaults = parameters_of(constructor)
    return {option: given for option, given in options.items() if not equal_options(given, defaults[option])}
