"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) of whole batches, as in timm's mode "batch"."""

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from linvit.errors import UserError

STREAM = 1  # joined to the seed, so that these numbers differ from those that the first sample was augmented with


class Mixup:
    """Mixes each image with its partner in the reversed batch: the first with the last, and so on.

    Args:
        mixup_alpha: Mixup draws lambda from Beta(alpha, alpha); 0 switches it off.
        cutmix_alpha: CutMix draws lambda from Beta(alpha, alpha); 0 switches it off.
        prob: Fraction of the batches that are mixed.
        switch_prob: Fraction of the mixed batches that take CutMix, where both are on.
    """

    def __init__(self, mixup_alpha: float, cutmix_alpha: float, prob: float = 1.0, switch_prob: float = 0.5) -> None:
        if mixup_alpha < 0 or cutmix_alpha < 0:
            raise UserError(f"mixup_alpha and cutmix_alpha must be 0 (off) or more; got {mixup_alpha}, {cutmix_alpha}")
        if not (0 <= prob <= 1 and 0 <= switch_prob <= 1):
            raise UserError(f"mixup_prob and mixup_switch_prob must lie between 0 and 1; got {prob}, {switch_prob}")
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha
        self.prob = prob
        self.switch_prob = switch_prob

    @property
    def active(self) -> bool:
        """Whether any batch can be mixed."""
        return bool(self.prob and (self.mixup_alpha or self.cutmix_alpha))

    def __call__(self, images: Tensor, labels: Tensor, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
        """Mixes a batch. All random numbers follow from the seed.

        Args:
            images: (B, 3, H, W).
            labels: Class indices (B,).
            num_classes: K.
            seed: Of this batch.

        Returns:
            Mixed images (B, 3, H, W), and target probabilities (B, K) before label smoothing.
        """
        rng = np.random.default_rng((seed, STREAM))
        target = F.one_hot(labels, num_classes).to(images.dtype)
        if rng.random() >= self.prob:
            return images, target
        both = self.mixup_alpha and self.cutmix_alpha
        use_cutmix = rng.random() < (self.switch_prob if both else bool(self.cutmix_alpha))
        alpha = self.cutmix_alpha if use_cutmix else self.mixup_alpha
        lam = float(rng.beta(alpha, alpha))
        images, lam = cutmix(images, lam, rng) if use_cutmix else (mixup(images, lam), lam)
        return images, target.lerp(target.flip(0), 1 - lam)


def mixup(images: Tensor, lam: float) -> Tensor:
    """`lam` of each image plus `1 - lam` of its partner in the reversed batch; (B, 3, H, W)."""
    return images.lerp(images.flip(0), 1 - lam)


def cutmix(images: Tensor, lam: float, rng: np.random.Generator) -> tuple[Tensor, float]:
    """Pastes a box of the partner into each image, of about `1 - lam` of the area; what lies outside is cut off.

    The box is that of timm 0.3.2 to 1.0.20, with which the papers' models were trained: a side of odd length loses
    its last pixel. Later versions of timm keep it.

    Returns:
        The images (B, 3, H, W), and the fraction of the area that is each image's own.
    """
    height, width = images.shape[-2:]
    half_height, half_width = (int(side * (1 - lam) ** 0.5) // 2 for side in (height, width))
    y, x = rng.integers(height), rng.integers(width)  # centre of the box
    rows = slice(max(y - half_height, 0), y + half_height)
    columns = slice(max(x - half_width, 0), x + half_width)
    mixed = images.clone()
    mixed[..., rows, columns] = images.flip(0)[..., rows, columns]
    pasted = images[0, 0, rows, columns].numel()
    return mixed, 1 - pasted / (height * width)
