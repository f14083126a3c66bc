"""The contract of an attention, one case of pytest per clause."""

from linvit.testing import parametrize_with_checks


@parametrize_with_checks(["cosine"], quick=True)
def test_cosine(check):
    check()
