"""The contract of a backbone, one case of pytest per clause."""

from linvit.testing import parametrize_with_checks


@parametrize_with_checks(["two_stage_tiny"], kind="backbone", img_size=32, quick=True)
def test_two_stage(check):
    check()
