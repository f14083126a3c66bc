"""One exported program for every batch, height and width; the slow contract tests have every name."""

import pytest
from torch import Tensor

from linvit import Grid
from linvit.registry import attentions
from linvit.testing.attention.inputs import AttentionSubject
from linvit.testing.backbone.images import BackboneSubject
from linvit.testing.behaviour import ONNX
from linvit.testing.compile import exports, onnx
from linvit.testing.report import ClauseError, Verdict
from tests.families import families, small
from tests.helpers import own_names
from tests.testing import wrong


class Bakes(wrong.Sound):
    """Does something else on its nominal grid, which no program for every grid can."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d) -> (B, h, N, d)."""
        out = super().forward(q, k, v, grid)
        return out if grid.size == self.grid.size else 2 * out


class Fixed(Bakes):
    """Says so."""

    exports_any_size = False


@pytest.mark.filterwarnings("ignore")
def test_a_mechanism_whose_program_is_for_one_size_fails_unless_it_declares_that() -> None:
    with pytest.raises(RuntimeError, match="your code specialized it to be a constant \\(14\\)"):
        exports(AttentionSubject(Bakes, 16, 2, quick=True))
    with pytest.raises(ClauseError, match="exports_any_size is False; exported and eager differ by") as declared:
        exports(AttentionSubject(Fixed, 16, 2, quick=True))
    assert declared.value.verdict is Verdict.UNSUPPORTED


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["softmax", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_plain_transformer_exported_at_its_own_size_is_right_at_others(attention: str) -> None:
    subject = BackboneSubject({"name": "deit_nano", "embed_dim": 24, "depth": 1}, attention, 32, quick=True)
    found = exports(subject)
    assert "(32x32)" in found
    assert "(32x64)" in found
    assert "(64x96)" in found


@pytest.mark.filterwarnings("ignore")
def test_windows_are_named_as_what_keeps_a_program_to_one_size() -> None:
    spec = {"name": "swin_tiny", "depths": [1, 1, 1, 1], "embed_dim": 12, "num_heads": [1, 1, 1, 1]}
    declared = "WindowAttention: exports_any_size is False; exported and eager differ by"
    with pytest.raises(ClauseError, match=declared) as found:
        exports(BackboneSubject(spec, "hydra", 32, quick=True))
    assert found.value.verdict is Verdict.UNSUPPORTED


def test_a_mechanism_in_onnxruntime_is_right_at_other_sizes_than_the_exported() -> None:
    assert onnx(AttentionSubject("hydra", 16, 2, quick=True)).count("e-") == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", own_names(attentions))
def test_every_mechanism_in_a_plain_transformer_as_an_onnx_file(attention: str) -> None:
    found = ONNX.line(BackboneSubject({"name": "deit_nano", "depth": 1}, attention, 32, quick=True))
    assert found.verdict is (Verdict.UNSUPPORTED if attention in ("nystrom", "mhla") else Verdict.PASS), found.note


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "name"), families().items())
def test_a_backbone_of_every_family_as_an_onnx_file(family: str, name: str) -> None:
    one_size = {"CSWin": "StripeAttention", "Swin": "WindowAttention"}
    found = ONNX.line(BackboneSubject(small(name), None, 64, quick=True))
    assert found.verdict is (Verdict.UNSUPPORTED if family in one_size else Verdict.PASS), found.note
    assert f"{one_size.get(family, '')}: exports_any_size is False" in found.note or family not in one_size
