"""`check_head` on heads of detection: a sound one passes, and each kind of mistake fails its clause."""

from pathlib import Path

import pytest

from linvit.heads.detection.retinanet import RetinaNet
from linvit.testing import check_head
from linvit.testing.head import check
from linvit.testing.head.subject import DetectionSubject, HeadSubject
from tests.testing.wrong_detection_heads import WRONG, Sound

PLUGIN = Path(__file__).parent.parent / "plugin" / "linvit-cells"


def test_a_sound_head_passes() -> None:
    report = check_head(Sound, quick=True)
    assert report.passed, f"\n{report}"
    assert report["detections"].note == "100, 100, 100, 100, 100, 100 in 6 images"


def test_a_third_party_s_head_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without anchors and with parts of its own alone."""
    monkeypatch.syspath_prepend(PLUGIN)
    report = check_head("linvit_cells:Cells", quick=True)
    assert report.passed, f"\n{report}"


@pytest.mark.parametrize("head", WRONG, ids=lambda head: head.__name__)
def test_a_mistake_fails_its_clause(head: type[RetinaNet]) -> None:
    (clause,) = (clause for clause in check.DETECTION.clauses if clause.name == head.breaks)
    found = clause.line(DetectionSubject(head, 64, quick=True))
    assert found.verdict.value == "FAIL", found.note


def test_the_contract_of_the_other_task_says_so() -> None:
    found = check.CONTRACT.first[0].line(HeadSubject(Sound, 64, quick=True))
    assert "its kind is 'detection_head'" in found.note
