"""Image sizes: a side or [H, W], positive whole numbers."""

import pytest

from linvit import UserError
from linvit.image_size import image_size


@pytest.mark.parametrize(("given", "want"), [(64, (64, 64)), ([48, 64], (48, 64)), ((7, 9), (7, 9))])
def test_a_side_or_height_and_width(given, want):
    assert image_size(given) == want


@pytest.mark.parametrize("given", [0, -8, [16], [16, 16, 16], [16, 0], [16.0, 16]])
def test_anything_else_is_a_user_error(given):
    with pytest.raises(UserError, match="img_size must be a positive side"):
        image_size(given)
