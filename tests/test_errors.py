"""Bounds of numbers, and what is said of one outside."""

import math
import re

import pytest

from linvit.errors import UserError, check_number, check_odd

BOUNDS = {"at_least": 1}, {"above": 0, "at_most": 2}, {"at_least": 0, "below": 1, "note": ", as a share"}, {}


@pytest.mark.parametrize(
    ("given", "bounds"), [(1, BOUNDS[0]), (7.5, BOUNDS[0]), (2, BOUNDS[1]), (1e-9, BOUNDS[1]), (0, BOUNDS[2]), (-9, {})]
)
def test_numbers_within_the_bounds(given: float, bounds: dict[str, float]) -> None:
    check_number("eps", given, **bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "bounds", "said"),
    [
        (0.5, BOUNDS[0], "a number at least 1; got 0.5"),
        (0, BOUNDS[1], "a number above 0 and at most 2; got 0"),
        (1, BOUNDS[2], "a number at least 0 and below 1, as a share; got 1"),
        (True, BOUNDS[0], "a number at least 1; got True"),
        ("3", BOUNDS[0], "a number at least 1; got '3'"),
        (None, {}, "a number; got None"),
        (math.nan, {}, "a number; got nan"),
        (math.inf, BOUNDS[0], "a number at least 1; got inf"),
        (2.0, {"at_least": 1, "whole": True}, "a whole number at least 1; got 2.0"),
    ],
)
def test_anything_else_is_refused(given: object, bounds: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=f"^eps must be {re.escape(said)}$"):
        check_number("eps", given, **bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [2, -3, 3.0, True])
def test_only_odd_numbers_have_a_centre(given: object) -> None:
    check_odd("kernel", 5, "3 or 5")
    with pytest.raises(UserError, match=f"^kernel must be odd and positive, such as 3 or 5; got {given!r}$"):
        check_odd("kernel", given, "3 or 5")
