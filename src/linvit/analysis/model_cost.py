"""What a whole model costs: multiply-accumulates and parameters."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from linvit.image_size import image_size


def macs(model: nn.Module, img_size: int | Sequence[int] = 224, in_chans: int = 3) -> int:
    """Multiply-accumulates of one image's forward pass in evaluation mode.

    Counted are convolutions, linear layers and matrix products, the two of softmax attention included, 1 per multiplied
    pair; not norms, activations, softmax, pooling, interpolation and products entry by entry (which are all there is to
    Hydra; see `Attention.cost`).

    A model on the meta device is counted there, without arithmetic.

    Args:
        model: Called with images (1, in_chans, H, W).
        img_size: Side, or (H, W).
        in_chans: Image channels.
    """
    parameter = next(model.parameters())
    images = torch.zeros(1, in_chans, *image_size(img_size), device=parameter.device, dtype=parameter.dtype)
    training = model.training
    model.eval()
    # The counter knows the products, but not the fused kernels of every device.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images)
    model.train(training)
    flops: int = counter.get_total_flops()
    return flops // 2


def num_parameters(model: nn.Module) -> int:
    """Learnable parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
