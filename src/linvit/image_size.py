"""Image sizes as users write them: a side, or [H, W]."""

from collections.abc import Sequence

from linvit.errors import UserError

__all__ = ["image_size"]


def image_size(img_size: int | Sequence[int]) -> tuple[int, int]:
    """Returns (H, W) for a side or for [H, W]; raises a `UserError` if it is neither, or not positive."""
    sides = [img_size, img_size] if isinstance(img_size, int) else list(img_size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise UserError(f"img_size must be a positive side, such as 224, or [height, width]; got {img_size}")
    return sides[0], sides[1]
