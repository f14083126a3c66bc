"""The contract of a head of detection, one case of pytest per clause."""

from linvit.testing import parametrize_with_checks


@parametrize_with_checks(["cells"], kind="detection_head", quick=True)
def test_cells(check):
    check()
