"""A backbone that breaks the contract fails the clause that says why; the slow test shows that it fails no other."""

import pytest

from linvit.testing import Report, Verdict, check_backbone
from linvit.testing.backbone.images import BackboneSubject
from linvit.testing.behaviour import constructor
from tests.testing import wrong_backbones
from tests.testing.helpers import backbone_lines, verdicts


def check(name: str, quick: bool = True) -> Report:
    return check_backbone(getattr(wrong_backbones, name), img_size=32, quick=quick)


@pytest.fixture(scope="module")
def sound() -> Report:
    return check("Sound")


def test_the_sound_one_passes_every_clause(sound: Report) -> None:
    assert verdicts(sound, Verdict.PASS) == {line.name for line in sound.lines}, f"\n{sound}"


NEARNESS = "a change in one corner moves a feature"
AUTOCAST = {"autocast bfloat16", "autocast float16"}
WRONG = {  # class -> the clauses that it breaks, all of them, and words of the first
    "LiesAboutFeatures": (
        {"shapes", "classifier"},
        "forward_head(pre_logits=True) gives (2, 24), head_hidden_size is 16",
    ),
    "ReportsOtherClasses": ({"shapes"}, "the attribute num_classes is 1000 after num_classes=7"),
    "ForwardIsAnother": ({"shapes", "classifier"}, "forward_head(forward_features(x)) and forward(x) differ by"),
    "LiesAboutChannels": ({"pyramid"}, "stages.0: (2, 16, 8, 8), feature_info announces (2, 24, 8, 8)"),
    "LiesAboutReductions": (
        {"pyramid", "height and width"},
        "stages.0: (2, 16, 8, 8), feature_info announces (2, 16, 16, 16)",
    ),
    "CountsFromTheEnd": ({"intermediates"}, "indices=[-1], stop_early=False gives other features"),
    "ExitsWhenPruned": ({"pyramid", "pruning"}, "SystemExit: 0"),
    "PrunesNothing": ({"pruning"}, "pruning to level 0 drops no parameter"),
    "PrunesTooMuch": ({"pruning"}, "the feature of level 0 is another after pruning"),
    "FixedSize": ({"any input"}, "RuntimeError: The size of tensor a"),
    "RefusesInSilence": ({"any input"}, "97x131 is refused without naming it: not this image"),
    "CrashesAtOthers": ({"any input"}, "RuntimeError: shape mismatch (at 97x131)"),
    "SquareOnly": ({"any input", "height and width"}, "(at 97x131)"),
    "Swapped": ({"height and width"}, "features of 32x64 are [(16, 8), (4, 8)] instead of [(8, 16), (4, 8)]"),
    "Misplaces": ({"height and width"}, NEARNESS),
    "Symmetric": ({"height and width"}, "transposing a square image moves the output by"),
    "ColourOnly": ({"shapes"}, "(at in_chans=1)"),
    "KeepsItsHead": ({"classifier"}, "reset_classifier(7) leaves the classifier as it was"),
    "KeepsItsWeights": ({"classifier"}, "reset_classifier(7) leaves the classifier as it was"),
    "IgnoresAttention": ({"another attention"}, "attention='linear' builds SoftmaxAttention"),
    "Counts": ({"determinism"}, "a call in evaluation changes its state: calls"),
    "BatchCoupled": ({"batch independence"}, "a sample's outputs differ by"),
    "ForgetsItsBuffer": ({"copies"}, "a fresh instance with its state dict differs by"),
    "KeepsALambda": ({"copies"}, "(at a pickle)"),
    "DeadParameter": ({"gradients"}, "gradient missing: norm.unused (none)"),
    "Detaches": ({"gradients"}, "gradient missing: images (none), stages.0.pos_embed (none)"),
    "CheckpointsNothing": ({"checkpointing"}, "MB kept for the backward pass"),
    "SkipsWhenCheckpointing": ({"checkpointing"}, "the gradient of "),
    "DividesWhenCheckpointing": ({"checkpointing"}, "the gradient of norm.weight differs by nan"),
    "CheckpointsForever": ({"checkpointing"}, "set_grad_checkpointing(False) does not switch it off"),
    "DropsAlways": ({"stochastic depth"}, "drop_path_rate=0.5 changes the output in evaluation by"),
    "IgnoresDropPath": ({"stochastic depth"}, "two calls in training with drop_path_rate=0.5 are equal"),
    "NeedsTwoImages": ({"stochastic depth"}, "ValueError: expected more than 1 value per channel"),
    "SparesWhatIsNotThere": ({"parameter groups"}, "no parameter is called pos_embed"),
    "FirstStageUngrouped": ({"parameter groups"}, " after stages.0."),
    "OneGroup": ({"parameter groups"}, "only the rates [1.0]"),
    "ReturnsFloat32": ({"float32 and float64"}, "float64 images give float32 logits"),
    "Cancels": ({"float32 and float64"}, "they differ by"),
    "OverflowsInHalf": ({"autocast float16"}, "logits not finite, images of scale"),
    "BreaksUnderAutocast": (AUTOCAST, "14 of 14 logits not finite, images of scale 2^-10"),
    "PlainTensor": ({"devices"}, "tensors that are neither parameters nor buffers: PlainTensor.mean"),
    "InsistsOnTheProcessor": ({"devices"}, "built under torch.device('meta'), on another device: mean"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_fails_its_clauses(name: str) -> None:
    names, words = WRONG[name]
    lines = backbone_lines(getattr(wrong_backbones, name), names)
    assert all(line.verdict is Verdict.FAIL for line in lines), lines
    assert words in lines[0].note


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_fails_no_other_clause(name: str, sound: Report) -> None:
    report = check(name)
    assert set(report.failures) == WRONG[name][0], f"\n{report}"
    assert not verdicts(report, Verdict.UNDECLARED) | verdicts(report, Verdict.UNSUPPORTED)
    assert [line.name for line in report.lines] == [line.name for line in sound.lines]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Crashes", "RuntimeError: out of luck and more"),
        ("Exits", "SystemExit: 0"),
        ("TakesNoImageSize", "its constructor takes no img_size (side or (H, W) of the images)."),
        ("HundredClasses", "num_classes has the default 100 instead of 1000"),
    ],
)
def test_what_cannot_be_built_by_the_contract_has_no_other_clauses(name: str, words: str) -> None:
    report = check(name)
    assert report.failures == ["constructor"]
    assert [line.name for line in report.lines] == ["constructor"]
    assert words in report["constructor"].note


def test_all_that_lacks_is_listed_at_once() -> None:
    """With what it is for; the same of a class that cannot be built by the contract, as far as its methods show."""
    (line,) = backbone_lines(wrong_backbones.Plain, {"constructor"})
    assert line.note == (
        "its constructor takes no drop_path_rate (stochastic depth); it has no num_features (channels of the last "
        "feature), head_hidden_size (channels of the pooled feature), feature_info (module, channels and reduction of "
        "each feature), forward_head (the last feature to logits), forward_intermediates (features of chosen levels), "
        "prune_intermediate_layers (drops what chosen features do not need), get_classifier (the classifier), "
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DropsInEvaluation", "two calls in evaluation differ by"),
        ("WritesToItsImages", "it writes to its input images"),
    ],
)
def test_what_spoils_other_clauses_too_fails_its_own(name: str, words: str) -> None:
    (line,) = backbone_lines(getattr(wrong_backbones, name), {"determinism"})
    assert line.verdict is Verdict.FAIL
    assert words in line.note


def test_a_size_that_is_refused_by_name_is_declared() -> None:
    (line,) = backbone_lines(wrong_backbones.RefusesOthers, {"any input"})
    assert line.verdict is Verdict.UNSUPPORTED
    assert "got an image of 97x131" in line.note


@pytest.mark.slow
def test_a_graph_break_fails_compilation_and_export() -> None:
    report = check("BreaksTheGraph", quick=False)
    assert set(report.failures) == {"devices", "torch.compile", "torch.export", "onnx"}, f"\n{report}"
