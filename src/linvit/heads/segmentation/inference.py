"""Class probabilities of pixels of images of any size, in memory that does not grow with classes times pixels.

Logits of all classes at full size are the largest tensor of an evaluation: 7.2 GB for 150 classes and 4,000 x 3,000
pixels. Here a band of rows is computed at a time, resized, and reduced to its classes.

Supports the three modes of mmsegmentation: the whole image at once; overlapping windows whose logits are averaged
("slide"); and the mean of the probabilities over resized and mirrored copies of the image.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.errors import UserError

BAND_BYTES = 64 * 2**20  # maximum size of the full-size logits in memory

Network = Callable[[Tensor], Tensor]
"""Maps images (B, 3, H, W) to logits (B, K, h, w) of any size."""


def bands(
    network: Network,
    views: Iterable[tuple[Tensor, bool]],
    size: Sequence[int],
    window: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """Yields the mean probabilities of views of images in bands (B, K, rows, W) of the result, from the top down.

    A view is the normalised images (B, 3, H, W), or resized copies, and True if they are mirrored. Logits, which should
    be small, are resized to the view and then to the result, as mmsegmentation does. `window` is the size of windows,
    None the whole image; `stride` is the step between them, None means two thirds of the window.
    """
    sources = [(_Windows(network, image, window, stride), mirrored) for image, mirrored in views]
    start, height = 0, 1
    while start < size[0]:
        stop = min(start + height, size[0])
        found = []
        for source, mirrored in sources:
            logits = _resized_rows(source.rows, source.size, size, start, stop)
            found.append((logits.flip(-1) if mirrored else logits).softmax(1))
        yield torch.stack(found).mean(0) if len(found) > 1 else found[0]
        start, height = stop, max(BAND_BYTES // (found[0][:, :, :1].numel() * found[0].element_size()), 1)


class _Windows:
    """Mean of the logits of overlapping windows, stored at the size in which the network computes them.

    Windows begin at multiples of the stride; the last ones are shifted to end with the image. An image
    smaller than the window is one window.
    """

    def __init__(
        self, network: Network, image: Tensor, window: Sequence[int] | None, stride: Sequence[int] | None
    ) -> None:
        self.network, self.image, self.size = network, image, tuple(image.shape[2:])
        window = window or self.size
        stride = stride or [max(2 * side // 3, 1) for side in window]
        self.tops, self.lefts = (starts(*axis) for axis in zip(self.size, window, stride, strict=True))
        self.window = [min(pair) for pair in zip(window, self.size, strict=True)]
        self._kept: list[tuple[int, int, Tensor]] = []  # the first row and column of each window, and its logits

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns logits (B, K, stop - start, W) of the images; must be called from top to bottom."""
        height, width = self.window
        while self.tops and self.tops[0] < stop:
            top = self.tops.pop(0)
            for left in self.lefts:
                logits = self.network(self.image[:, :, top : top + height, left : left + width])
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half loses small differences
                self._kept.append((top, left, logits))
        self._kept = [kept for kept in self._kept if kept[0] + height > start]
        total, count = None, self.image.new_zeros(stop - start, self.size[1])
        for top, left, logits in self._kept:
            first, last = max(start, top), min(stop, top + height)
            part = _resized_rows(_rows_of(logits), logits.shape[2:], self.window, first - top, last - top)
            if len(self._kept) == 1:
                return part
            if total is None:
                total = part.new_zeros(*part.shape[:2], *count.shape)
            total[:, :, first - start : last - start, left : left + width] += part
            count[first - start : last - start, left : left + width] += 1
        assert total is not None
        return total.div_(count)


def starts(side: int, window: int, stride: int) -> list[int]:
    """Returns the first pixel of each window along an axis of an image."""
    if not 0 < stride <= window:
        raise UserError(f"the stride of windows of {window} pixels must be between 1 and {window}; got {stride}")
    rest = max(side - window, 0)
    return [min(i * stride, rest) for i in range(-(-rest // stride) + 1)]


def _rows_of(logits: Tensor) -> Callable[[int, int], Tensor]:
    return lambda start, stop: logits[:, :, start:stop]


def _resized_rows(
    rows: Callable[[int, int], Tensor], source: Sequence[int], size: Sequence[int], start: int, stop: int
) -> Tensor:
    """Returns rows of a tensor resized by bilinear interpolation between centres of pixels, as by `F.interpolate`."""
    if tuple(source) == tuple(size):
        return rows(start, stop)
    at = ((torch.arange(start, stop, dtype=torch.float64) + 0.5) * source[0] / size[0] - 0.5).clamp(0, source[0] - 1)
    above = at.long()
    below = (above + 1).clamp(max=source[0] - 1)
    first = int(above[0])
    x = rows(first, int(below[-1]) + 1)
    weight = (at - above).to(x.dtype).to(x.device, non_blocking=True)[:, None]  # (rows, 1)
    upper, lower = (x[:, :, (row - first).to(x.device, non_blocking=True)] for row in (above, below))
    x = torch.lerp(upper, lower, weight)
    return F.interpolate(x, (stop - start, size[1]), mode="bilinear", align_corners=False)
