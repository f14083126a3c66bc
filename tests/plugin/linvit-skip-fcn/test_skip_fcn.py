"""The contract of a head, one case of pytest per clause."""

from linvit.testing import parametrize_with_checks


@parametrize_with_checks(["skip_fcn"], kind="head", quick=True)
def test_skip_fcn(check):
    check()
