"""The student: a copy of a trained network with another attention."""

import copy
from collections.abc import Sequence

from torch import nn

from linvit.backbones.replace_attention import replace_attention
from linvit.registry import Spec


def linearize(
    model: nn.Module, attention: Spec | Sequence[Spec | None], img_size: int | Sequence[int] = 224
) -> nn.Module:
    """Returns a copy of a trained network with another attention and all weights that this attention can use.

    The projections, feed-forward layers, norms, embeddings and the classifier are the network's; the parameters of
    another mechanism are new. The network itself stays as it is, so it can be the teacher of a `Distillation`.

    Args:
        model: A backbone of linvit or timm, or a network with a `backbone`, such as `linvit.create_segmentor` makes.
        attention: One spec, or a list with one per stage or per block; None in a list keeps the attention of a block.
        img_size: Side, or (H, W), that mechanisms with parameters per token are built for, in a timm model that takes
            any size.

    Returns:
        The student, in the mode (training or evaluation) of the model. All its parameters are trainable, also those of
        a frozen model.

    Example:
        >>> teacher = timm.create_model("vit_small_patch14_dinov2", pretrained=True)
        >>> student = linvit.linearize(teacher, "focused")
    """
    student = copy.deepcopy(model).requires_grad_(True)
    replace_attention(getattr(student, "backbone", student), attention, img_size)
    return student
