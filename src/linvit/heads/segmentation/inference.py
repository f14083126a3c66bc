"""The class of each pixel of an image of any size, in memory that does not grow with classes times pixels.

Logits of all classes at full size are the largest tensor of an evaluation: 7.2 GB for 150 classes and 4,000 x 3,000
pixels. Here they exist for a band of rows at a time, which is resized and replaced by its classes.

The three ways of mmsegmentation: the whole image at once; overlapping windows whose logits are averaged ("slide"); and
the mean of the probabilities over resized and mirrored copies of the image.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.errors import UserError

BAND_BYTES = 64 * 2**20  # of the logits that exist at once at full size

Network = Callable[[Tensor], Tensor]
"""Images (B, 3, H, W) to logits (B, K, h, w) of any size."""


class View(NamedTuple):
    """One copy of an image that is segmented.

    Attributes:
        image: (1, 3, H, W), normalised.
        mirrored: Whether left and right are exchanged.
    """

    image: Tensor
    mirrored: bool = False


class Resized:
    """Logits resized by bilinear interpolation between the centres of pixels, as `F.interpolate` resizes them.

    Args:
        logits: (B, K, h, w), or those of windows.
        size: Height and width of the result.
    """

    def __init__(self, logits: "Tensor | Resized | Windows", size: Sequence[int]) -> None:
        self.logits = logits
        self.size = (size[0], size[1])

    def band(self, start: int, stop: int) -> Tensor:
        """Rows from `start` to `stop`: (B, K, stop - start, W). Bands are asked for from top to bottom."""
        height, width = self.size
        rows = self.logits.shape[-2:] if isinstance(self.logits, Tensor) else self.logits.size
        if tuple(rows) == self.size:
            return self._own(start, stop)
        at = ((torch.arange(start, stop, dtype=torch.float64) + 0.5) * rows[0] / height - 0.5).clamp(0, rows[0] - 1)
        above = at.long()
        below = (above + 1).clamp(max=rows[0] - 1)
        first = int(above[0])
        x = self._own(first, int(below[-1]) + 1)
        weight = (at - above).to(x)[:, None]  # (rows, 1)
        x = torch.lerp(x[:, :, (above - first).to(x.device)], x[:, :, (below - first).to(x.device)], weight)
        return F.interpolate(x, (stop - start, width), mode="bilinear", align_corners=False)

    def _own(self, start: int, stop: int) -> Tensor:
        """Rows of the logits before they are resized."""
        return self.logits[:, :, start:stop] if isinstance(self.logits, Tensor) else self.logits.band(start, stop)


class Windows:
    """The mean of the logits of overlapping windows, which are kept as small as the network makes them.

    Windows begin at multiples of the stride; the last ones are shifted so that they end with the image. An image
    smaller than the window is one window.
    """

    def __init__(self, network: Network, image: Tensor, window: Sequence[int], stride: Sequence[int]) -> None:
        self.network = network
        self.image = image
        self.size = (image.shape[2], image.shape[3])
        self.tops, self.lefts = (starts(*axis) for axis in zip(self.size, window, stride, strict=True))
        self.window = (min(window[0], self.size[0]), min(window[1], self.size[1]))
        self._kept: list[tuple[int, int, Resized]] = []  # the first row and column of each window, and its logits

    def band(self, start: int, stop: int) -> Tensor:
        """Rows from `start` to `stop`; see `Resized.band`."""
        height, width = self.window
        while self.tops and self.tops[0] < stop:
            top = self.tops.pop(0)
            for left in self.lefts:
                logits = self.network(self.image[:, :, top : top + height, left : left + width])
                self._kept.append((top, left, Resized(logits, self.window)))
        self._kept = [kept for kept in self._kept if kept[0] + height > start]
        total, count = None, self.image.new_zeros(stop - start, self.size[1])
        for top, left, rows in self._kept:
            first, last = max(start, top), min(stop, top + height)
            part = rows.band(first - top, last - top)
            if total is None:
                total = part.new_zeros(*part.shape[:2], stop - start, self.size[1])
            total[:, :, first - start : last - start, left : left + width] += part
            count[first - start : last - start, left : left + width] += 1
        assert total is not None
        return total.div_(count)


def starts(side: int, window: int, stride: int) -> list[int]:
    """The first pixel of each window along an axis. Raises a `UserError` if the stride leaves pixels out."""
    if not 0 < stride <= window:
        raise UserError(f"the stride of windows of {window} pixels must lie between 1 and {window}; got {stride}")
    rest = max(side - window, 0)
    return [min(i * stride, rest) for i in range(-(-rest // stride) + 1)]


@torch.no_grad()
def segment(
    network: Network,
    views: Iterable[View],
    size: Sequence[int],
    window: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
) -> Tensor:
    """Classifies the pixels of an image.

    Args:
        network: Images to logits; `Segmentor.logits`, whose logits are small, or the segmentor.
        views: The image, or resized and mirrored copies of it, whose probabilities are averaged.
        size: Height and width of the result: those of the labels, or of the original image.
        window: Height and width of the windows; None takes the whole image.
        stride: Step between windows; None is two thirds of the window.

    Returns:
        Classes (H, W), int64.

    Raises:
        UserError: If the stride is larger than the window, which would leave pixels out.
    """
    return torch.cat([band.argmax(1)[0] for band in bands(network, views, size, window, stride)])


def bands(
    network: Network,
    views: Iterable[View],
    size: Sequence[int],
    window: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """Yields the mean probabilities of the views in bands (1, K, rows, W), from top to bottom.

    Arguments are those of `segment`.
    """
    if window is not None and stride is None:
        stride = [max(2 * side // 3, 1) for side in window]

    def logits(image: Tensor) -> Tensor:
        found = network(image)
        return found.to(torch.promote_types(found.dtype, torch.float32))  # half precision loses small differences

    sources: list[tuple[Resized, bool]] = []
    for image, mirrored in views:
        # Logits are resized to the image and then to the result, as mmsegmentation does.
        if window is None or stride is None:
            source: Resized | Windows = Resized(logits(image), image.shape[2:])
        else:
            source = Windows(logits, image, window, stride)
        sources.append((Resized(source, size), mirrored))
    start, height = 0, 1
    while start < size[0]:
        stop = min(start + height, size[0])
        found = [rows.band(start, stop) for rows, _ in sources]
        pairs = zip(found, sources, strict=True)
        probabilities = [(x.flip(-1) if mirrored else x).softmax(1) for x, (_, mirrored) in pairs]
        yield torch.stack(probabilities).mean(0) if len(probabilities) > 1 else probabilities[0]
        start, height = stop, max(BAND_BYTES // (found[0][:, :, :1].numel() * found[0].element_size()), 1)
