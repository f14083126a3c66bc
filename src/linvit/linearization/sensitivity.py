"""Which blocks of a network suffer most from another attention, measured without training (JetViT, 2026)."""

from collections.abc import Iterable, Sequence
from statistics import mean

from torch import Tensor, nn

from linvit.errors import UserError
from linvit.linearization.distillation import Distillation, Matching, matched_layers
from linvit.linearization.student import linearize
from linvit.registry import Spec


def sensitivities(
    teacher: nn.Module, attention: Spec, batches: Iterable[Tensor], img_size: int | Sequence[int] = 224
) -> dict[str, float]:
    """How far the last features move when the attention of one block alone is replaced.

    Args:
        teacher: The trained network; it stays as it is, in evaluation mode.
        attention: What replaces its attention; its new parameters have initial values.
        batches: Images (B, C, H, W).
        img_size: As in `linvit.linearize`.

    Returns:
        For each attention layer, in order, the mean squared error of the last features over their mean square.
    """
    images = list(batches)
    names = matched_layers(teacher, linearize(teacher, attention, img_size))
    found = {}
    for i, name in enumerate(names):
        specs = [attention if i == j else None for j in range(len(names))]
        student = linearize(teacher, specs, img_size)
        distillation = Distillation(teacher, student, Matching(feature_weight=1.0))
        found[name] = mean(sum(distillation.distances(batch)["features"].values()) for batch in images)
        distillation.close()
    return found


def keeping(attention: Spec, sensitivity: dict[str, float], count: int) -> list[Spec | None]:
    """One spec per block: None, which keeps a block as it is, for the `count` blocks that suffer most.

    Raises:
        UserError: If there are not more blocks than are to be kept.
    """
    if not 0 <= count < len(sensitivity):
        raise UserError(f"of {len(sensitivity)} blocks 0 to {len(sensitivity) - 1} can be kept; got {count}")
    worst = sorted(sensitivity, key=lambda name: -sensitivity[name])[:count]
    return [None if name in worst else attention for name in sensitivity]
