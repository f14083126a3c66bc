"""One exported program for every batch, height and width; the slow contract tests have every name."""

import pytest

from linvit.registry import attentions
from linvit.testing.backbone.images import BackboneSubject
from linvit.testing.compile import compiles, exports, onnx
from linvit.testing.report import ClauseError, Verdict
from tests.families import families, small
from tests.helpers import own_names
from tests.testing.helpers import backbone_lines

PLAIN = {"name": "deit_nano", "embed_dim": 24, "depth": 1}


def plain(attention: str) -> BackboneSubject:
    return BackboneSubject(PLAIN, attention, 32, quick=True)


@pytest.mark.filterwarnings("ignore")
def test_a_mechanism_whose_program_is_for_one_size_fails_unless_it_declares_that() -> None:
    with pytest.raises(AssertionError, match="Guard failed"):
        exports(plain("tests.testing.wrong:Bakes"))
    with pytest.raises(ClauseError, match="exports_any_size is False; exported and eager differ by") as declared:
        exports(plain("tests.testing.wrong:BakesDeclared"))
    assert declared.value.verdict is Verdict.UNSUPPORTED


@pytest.mark.filterwarnings("ignore")
def test_a_mechanism_with_another_output_in_compiled_code_fails() -> None:
    subject = plain("tests.testing.wrong:DiffersCompiled")
    subject.compilations = (("aot_eager", ((32, 32),), False),)
    with pytest.raises(ClauseError, match="compiled and eager differ by") as compiled:
        compiles(subject)
    assert compiled.value.verdict is Verdict.FAIL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_mechanism_with_another_output_in_an_onnx_file_fails() -> None:
    with pytest.raises(ClauseError, match="exported and eager differ by"):
        onnx(plain("tests.testing.wrong:DiffersCompiled"))


@pytest.mark.filterwarnings("ignore")
def test_a_plain_transformer_exported_at_its_own_size_is_right_at_others() -> None:
    found = exports(plain("softmax"))
    assert "(32x32)" in found
    assert "(32x64)" in found
    assert "(64x96)" in found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", own_names(attentions))
def test_every_mechanism_in_a_plain_transformer(attention: str) -> None:
    """Compiled in one graph, with gradients, and exported as a program and as an ONNX file."""
    of_one_size = attention in ("nystrom", "mhla", "window")  # the grid fits into a window of 14 x 14
    for line in backbone_lines({**PLAIN, "attention": attention}, {"torch.compile", "torch.export", "onnx"}):
        fixed = of_one_size and line.name != "torch.compile"
        assert line.verdict is (Verdict.UNSUPPORTED if fixed else Verdict.PASS), line


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "name"), families().items())
def test_a_backbone_of_every_family_as_an_onnx_file(family: str, name: str) -> None:
    one_size = {"CSWin": "StripeAttention", "Swin": "WindowAttention"}
    (found,) = backbone_lines(small(name), {"onnx"}, 64)
    assert found.verdict is (Verdict.UNSUPPORTED if family in one_size else Verdict.PASS), found.note
    assert f"{one_size.get(family, '')}: exports_any_size is False" in found.note or family not in one_size
