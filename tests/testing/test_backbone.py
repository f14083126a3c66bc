"""`check_backbone`: what it makes of specs, callables, sizes and attention, and what it leaves alone."""

from functools import partial

import pytest
import torch

import linvit
from linvit.backbones.deit import deit_nano
from linvit.testing import Verdict, check_backbone
from linvit.testing.backbone.check import CONTRACT, classifier, shapes
from linvit.testing.backbone.images import BackboneSubject
from linvit.testing.backbone.numerics import parameter_groups
from linvit.testing.behaviour import copies, gradients
from tests.testing.helpers import backbone_lines, clauses, verdicts
from tests.testing.wrong_backbones import Sound

TINY = {"name": "deit_nano", "depth": 2, "embed_dim": 24}


def test_a_name_with_options_and_an_attention() -> None:
    report = check_backbone(TINY, "linear", img_size=16, quick=True)
    assert report.passed, f"\n{report}"
    assert report.subject == "deit_nano, depth=2, embed_dim=24"
    assert report["shapes"].note == "features (2, 16, 24), pooled (2, 24), logits (2, 7)"
    assert report["pyramid"].note == "2 of 24 at 1/4"
    assert report["another attention"].note == "2 layers"
    assert verdicts(report, Verdict.UNSUPPORTED) == {"any input"}
    assert "97x131" in report["any input"].note
    assert "through an instance for 32x32" in report["any input"].note


@pytest.mark.parametrize("attention", ["focused", ["linear", {"name": "focused", "focusing_factor": 4}]], ids=str)
def test_a_class_token_hides_from_the_logits_what_the_last_block_does_to_patches(attention: object) -> None:
    spec = {**TINY, "class_token": True, "global_pool": "token"}
    subject = BackboneSubject(spec, attention, 16, quick=True)
    assert gradients(subject)


def test_a_backbone_may_have_one_feature() -> None:
    (line,) = backbone_lines({**TINY, "depth": 1}, {"intermediates"}, 16)
    assert (line.verdict, line.note) == (Verdict.PASS, "1 features")


def test_layers_may_share_a_parameter() -> None:
    """It has the rate of the first of them."""
    subject = BackboneSubject(TINY, {"name": "linformer", "share": "layerwise", "k": 8}, 16, quick=True)
    assert parameter_groups(subject)
    assert copies(subject)


def test_a_model_may_have_two_classifiers() -> None:
    subject = BackboneSubject(
        {**TINY, "class_token": True, "global_pool": "token", "distilled": True}, None, 16, quick=True
    )
    assert classifier(subject)
    assert parameter_groups(subject)


def test_callables() -> None:
    subject = BackboneSubject(Sound, ["linear", "softmax"], (32, 16), quick=True)
    assert str(subject) == "tests.testing.wrong_backbones:Sound"
    assert shapes(subject).startswith("features (2, 8, 24)")
    subject = BackboneSubject(partial(deit_nano, depth=2, embed_dim=24), None, 16, quick=True)
    assert str(subject) == "linvit.backbones.deit:DeiT"
    assert shapes(subject) == "features (2, 16, 24), pooled (2, 24), logits (2, 7)"


@pytest.mark.parametrize(
    ("spec", "attention", "size", "message"),
    [
        ("deit_nanno", None, 32, "no backbone is called 'deit_nanno'. Did you mean 'deit_nano'?"),
        ({"name": "deit_nano", "blocks": 4}, None, 32, "backbone 'deit_nano' takes no option 'blocks'."),
        ("tests.testing.wrong_backbones:Missing", None, 32, "backbone class 'tests.testing.wrong_backbones:Missing' "),
        ("deit_nano", "focussed", 32, "no attention is called 'focussed'. Did you mean 'focused'?"),
        ("deit_nano", ["linear"] * 3, 32, "attention lists 3 specs"),
        ("tests.testing.wrong_backbones:HundredClasses", "linear", 32, "has no option attention"),
        ("deit_nano", None, 50, "image size 50x50 is not divisible by patch size 4"),
        ("deit_nano", None, 0, "img_size must be a positive side"),
    ],
)
def test_what_the_caller_can_fix_is_raised(spec: object, attention: object, size: int, message: str) -> None:
    with pytest.raises(linvit.UserError) as error:
        check_backbone(spec, attention, img_size=size)
    assert message in str(error.value)


def test_random_numbers_of_the_caller_stay() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    backbone_lines(Sound, {"determinism", "copies", "stochastic depth"})
    assert torch.equal(torch.get_rng_state(), state)


def test_a_quick_run_leaves_out_the_compiler() -> None:
    assert clauses(CONTRACT, lambda check: not check.quick) == ["torch.compile", "torch.export", "onnx"]


@pytest.mark.slow
def test_the_full_run_compiles_exports_and_takes_large_images() -> None:
    report = check_backbone(Sound, img_size=32)
    assert report.passed, f"\n{report}"
    assert "512x512" in report["any input"].note
    assert "(inductor at 32x32)" in report["torch.compile"].note
    assert report["torch.export"].verdict is Verdict.PASS
