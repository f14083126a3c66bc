"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) of whole batches, as timm does them in mode "batch"."""

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from linvit.errors import UserError

STREAM = 1  # beside the batch's key, so that these numbers are none of those that its first sample was augmented with


class Mixing:
    """Mixes each image with its mirror in the batch: the first with the last, and so on.

    Args:
        mixup_alpha: Beta(alpha, alpha) of mixup; 0 is off.
        cutmix_alpha: Beta(alpha, alpha) of CutMix; 0 is off.
        prob: Share of the batches that are mixed.
        switch: Share of the mixed batches that take CutMix, where both are on.
    """

    def __init__(self, mixup_alpha: float, cutmix_alpha: float, prob: float = 1.0, switch: float = 0.5) -> None:
        if mixup_alpha < 0 or cutmix_alpha < 0:
            raise UserError(f"mixup_alpha and cutmix_alpha must be 0 (off) or more; got {mixup_alpha}, {cutmix_alpha}")
        if not (0 <= prob <= 1 and 0 <= switch <= 1):
            raise UserError(f"mix_prob and mix_switch must lie between 0 and 1; got {prob}, {switch}")
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha
        self.prob = prob
        self.switch = switch

    @property
    def active(self) -> bool:
        """Whether anything is ever mixed."""
        return bool(self.prob and (self.mixup_alpha or self.cutmix_alpha))

    def __call__(self, images: Tensor, labels: Tensor, num_classes: int, key: int) -> tuple[Tensor, Tensor]:
        """Mixes a batch; what is drawn depends on the key alone.

        Args:
            images: (B, 3, H, W).
            labels: Class indices (B,).
            num_classes: K.
            key: Of the batch.

        Returns:
            Mixed images, and shares of the classes (B, K) before label smoothing.
        """
        rng = np.random.default_rng((key, STREAM))
        target = F.one_hot(labels, num_classes).to(images.dtype)
        if rng.random() >= self.prob:
            return images, target
        cutmix = rng.random() < (self.switch if self.mixup_alpha and self.cutmix_alpha else bool(self.cutmix_alpha))
        alpha = self.cutmix_alpha if cutmix else self.mixup_alpha
        share = float(rng.beta(alpha, alpha))
        images, share = cut_mix(images, share, rng) if cutmix else (mix_up(images, share), share)
        return images, target.lerp(target.flip(0), 1 - share)


def mix_up(images: Tensor, share: float) -> Tensor:
    """`share` of each image and the rest of its mirror."""
    return images.lerp(images.flip(0), 1 - share)


def cut_mix(images: Tensor, share: float, rng: np.random.Generator) -> tuple[Tensor, float]:
    """A box of the mirror in each image, of 1 - share of the area if none of it falls over the edge.

    Returns:
        The images, and the share that is really each one's own.
    """
    height, width = images.shape[-2:]
    box_height, box_width = int(height * (1 - share) ** 0.5), int(width * (1 - share) ** 0.5)
    y, x = rng.integers(height), rng.integers(width)  # centre of the box
    rows = slice(max(y - box_height // 2, 0), y + (box_height + 1) // 2)
    columns = slice(max(x - box_width // 2, 0), x + (box_width + 1) // 2)
    mixed = images.clone()
    mixed[..., rows, columns] = images.flip(0)[..., rows, columns]
    taken = images[0, 0, rows, columns].numel()
    return mixed, 1 - taken / (height * width)
