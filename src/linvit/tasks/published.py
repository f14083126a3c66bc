"""Scores that the authors of a model published, for comparison."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from linvit.image_size import image_size
from linvit.registry import backbones, heads
from linvit.registry.model_info import dense_info, model_info
from linvit.registry.signatures import equal_options, parameters_of


@dataclass(frozen=True)
class PublishedScores:
    """Scores of a model that its authors published, and where."""

    scores: Mapping[str, float]
    source: str


def published_top1(given: Mapping[str, Any]) -> PublishedScores | None:
    """Returns the top-1 accuracy on ImageNet-1K in [0, 1] published by the authors for a task's model; else None."""
    name, options = backbones.parse(given["backbone"])
    facts = model_info().get(name)
    if facts is None or facts.top1 is None or given["attention"] is not None or given["num_classes"] != 1000:
        return None
    changed = _changed(options, backbones.get(name))
    if image_size(given["img_size"]) != (facts.img_size, facts.img_size) or (
        changed and not equal_options(changed, facts.also)
    ):
        return None
    return PublishedScores({"top1": facts.top1 / 100}, facts.top1_source)


def published_miou(given: Mapping[str, Any]) -> PublishedScores | None:
    """Returns the mean IoU on ADE20K in [0, 1], trained on crops of 512x512; see `published_top1`."""
    theirs = given["num_classes"] == 150 and image_size(given["img_size"]) == (512, 512)
    return _published(given, "") if theirs else None


def published_ap(given: Mapping[str, Any]) -> PublishedScores | None:
    """Returns the average precision on COCO in [0, 1], trained for as long; see `published_top1`."""
    schedule = {(8, 11): "1x", (27, 33): "3x"}.get(tuple(given["decay_epochs"]))
    return _published(given, schedule) if schedule and given["num_classes"] == 80 else None


def _published(given: Mapping[str, Any], schedule: str) -> PublishedScores | None:
    (name, options), (head_name, head_options) = backbones.parse(given["backbone"]), heads.parse(given["head"])
    found = dense_info().get((name, head_name, schedule))
    if (
        found is None
        or not found.scores
        or given["attention"] is not None
        or _changed(head_options, heads.get(head_name))
    ):
        return None
    changed, theirs = (_changed(each, backbones.get(name)) for each in (options, found.options))
    return PublishedScores(found.scores, found.source) if equal_options(changed, theirs) else None


def _changed(options: Mapping[str, Any], constructor: Any) -> dict[str, Any]:
    """Returns options that differ from the constructor's defaults."""
    defaults = parameters_of(constructor)
    return {option: given for option, given in options.items() if not equal_options(given, defaults[option])}
