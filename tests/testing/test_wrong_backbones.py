"""A backbone that breaks the contract fails the clause that concerns it, which says what is wrong."""

import pytest

from linvit.testing import Verdict, behaviour, check_backbone
from linvit.testing.backbone.check import CONTRACT
from linvit.testing.backbone.images import BackboneSubject
from linvit.testing.behaviour import constructor
from tests.testing import wrong_backbones
from tests.testing.helpers import assert_fail, backbone_lines, clauses, verdicts

WRONG = {  # class -> clauses that it breaks, and words of the first
    "HundredClasses": ({"constructor"}, "num_classes has the default 100 instead of 1000"),
    "ForwardIsAnother": ({"shapes", "classifier"}, "forward_head(forward_features(x)) and forward(x) differ by"),
    "LiesAboutChannels": ({"pyramid"}, "stages.0: (2, 16, 8, 8), feature_info announces (2, 24, 8, 8)"),
    "CountsFromTheEnd": ({"intermediates"}, "indices=[-1], stop_early=False gives other features"),
    "PrunesNothing": ({"pruning"}, "pruning to level 0 drops no parameter"),
    "FixedSize": ({"any input"}, "RuntimeError: The size of tensor a"),
    "RefusesInSilence": ({"any input"}, "97x131 is refused without naming it: not this image"),
    "Swapped": ({"height and width"}, "features of 32x64 are [(16, 8), (4, 8)] instead of [(8, 16), (4, 8)]"),
    "Misplaces": ({"height and width"}, "a change in one corner moves a feature"),
    "Symmetric": ({"height and width"}, "transposing a square image moves the output by"),
    "KeepsItsWeights": ({"classifier"}, "reset_classifier(7) leaves the classifier as it was"),
    "IgnoresAttention": ({"another attention"}, "attention='linear' builds SoftmaxAttention"),
    "CheckpointsNothing": ({"checkpointing"}, "MB kept for the backward pass"),
    "SkipsWhenCheckpointing": ({"checkpointing"}, "the gradient of "),
    "CheckpointsForever": ({"checkpointing"}, "set_grad_checkpointing(False) does not switch it off"),
    "DropsAlways": ({"stochastic depth"}, "drop_path_rate=0.5 changes the output in evaluation by"),
    "IgnoresDropPath": ({"stochastic depth"}, "two calls in training with drop_path_rate=0.5 are equal"),
    "SparesWhatIsNotThere": ({"parameter groups"}, "no parameter is called pos_embed"),
    "FirstStageUngrouped": ({"parameter groups"}, " after stages.0."),
    "ReturnsFloat32": ({"float32 and float64"}, "float64 images give float32 logits"),
    "Cancels": ({"float32 and float64"}, "they differ by"),
    "BreaksUnderAutocast": (
        {"autocast bfloat16", "autocast float16"},
        "14 of 14 logits not finite, images of scale 2^-10",
    ),
    "PlainTensor": ({"devices"}, "tensors that are neither parameters nor buffers: PlainTensor.mean"),
    "InsistsOnTheProcessor": ({"devices"}, "built under torch.device('meta'), on another device: mean"),
}


def test_the_sound_one_passes_every_clause_and_each_has_a_wrong_one() -> None:
    """But for those that attentions have, too: their wrong ones are there."""
    report = check_backbone(wrong_backbones.Sound, img_size=32, quick=True)
    assert verdicts(report, Verdict.PASS) == {line.name for line in report.lines}, f"\n{report}"
    assert all(line.seconds > 0 for line in report.lines)
    assert sum(line.seconds for line in report.lines) <= report.seconds
    shared = {check.name for check in (behaviour.BATCH_INDEPENDENCE, *behaviour.COMMON)}
    assert set().union(*(names for names, _ in WRONG.values())) | shared == set(clauses(CONTRACT))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_fails_its_clauses(name: str) -> None:
    names, words = WRONG[name]
    assert_fail(backbone_lines(getattr(wrong_backbones, name), names), words)


def test_all_that_lacks_is_listed_at_once() -> None:
    """With what it is for; the same of a class that cannot be built by the contract, as far as its methods show."""
    (line,) = backbone_lines(wrong_backbones.Plain, {"constructor"})
    assert line.note == (
        "its constructor takes no drop_path_rate (stochastic depth); it has no num_features (channels of the last "
        "feature), head_hidden_size (channels of the pooled feature), feature_info (module, channels and reduction of "
        "each feature), forward_head (the last feature to logits), forward_intermediates (features of chosen levels), "
        "prune_intermediate_layers (drops modules that chosen features do not need), get_classifier (the classifier), "
        "reset_classifier (replaces the classifier), set_grad_checkpointing (recomputes activations in the backward "
        "pass), group_matcher (layer groups for layer-wise learning rates). linvit.Backbone has all members to inherit"
    )
    (line,) = backbone_lines(wrong_backbones.PlainWithoutSize, {"constructor"})
    assert "takes no num_classes (classes), img_size (side or (H, W) of the images), drop_path_rate (sto" in line.note
    assert "; it has no forward_head (the last feature to logits), forward_intermediates" in line.note


def test_a_factory_with_keyword_arguments_takes_what_its_model_takes() -> None:
    def factory(**options: object) -> wrong_backbones.Sound:
        return wrong_backbones.Sound(**options)

    attention = BackboneSubject(factory, "linear", 32, quick=True)
    assert constructor(attention)
    assert {type(module).__name__ for module in attention.model.modules()} & {"LinearAttention"}


def test_a_size_that_is_refused_by_name_is_declared() -> None:
    (line,) = backbone_lines(wrong_backbones.RefusesOthers, {"any input"})
    assert line.verdict is Verdict.UNSUPPORTED
    assert "got an image of 97x131" in line.note
