"""What the attention layers of a network receive for an image, without touching the network."""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from linvit.analysis.recorder import Call, Recorder, mechanisms
from linvit.backbones.replace_attention import replace_attention


def observable(network: nn.Module, img_size: int | Sequence[int]) -> nn.Module:
    """A copy to record from: in evaluation mode, not compiled, without hooks of others, with the network's own weights.

    Parameters and buffers are shared and not copied. Where the network has no mechanism of linvit, the attention of its
    timm model is replaced by linvit's softmax, which computes the same from the same projections.

    Args:
        network: A backbone, ours or timm's, or a network with a `backbone`.
        img_size: Side, or (H, W), of the images.

    Raises:
        UserError: If the network has neither; it names what mixes the tokens there.
    """
    memo: dict[int, object] = {id(tensor): tensor for tensor in chain(network.parameters(), network.buffers())}
    for module in network.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks"):  # the model's own, which tell a timm model its grid, are copied with it
                own = {key: hook for key, hook in hooks.items() if type(hook).__module__.startswith("linvit.backbones")}
                memo[id(hooks)] = OrderedDict(copy.deepcopy(own, memo))
    copied = copy.deepcopy(network, memo).eval()
    if not mechanisms(copied):
        backbone = getattr(copied, "backbone", copied)
        replace_attention(backbone, "softmax", img_size)
        backbone.eval()
    return copied


@torch.no_grad()
def observe(network: nn.Module, image: Tensor) -> dict[str, Call]:
    """What each attention layer receives for one image (1, 3, H, W), by the layer's name.

    Raises:
        UserError: As `observable`.
    """
    copied = observable(network, tuple(image.shape[-2:]))
    with Recorder(copied, samples=None) as recorder:
        copied(image)
    return {shown(layer): call for layer, call in recorder.calls.items()}


def shown(layer: str) -> str:
    """The name of a layer in curves and tables, the same within a network and for the backbone alone."""
    return layer.removeprefix("network.").removeprefix("backbone.")
