"""The initial values of a backbone, and parameters that its mechanisms share."""

from timm.layers import trunc_normal_
from torch import nn

from linvit.attention.base import Attention


def init_vit(module: nn.Module) -> None:
    """Gives linear layers a vision transformer's initial values; mechanisms keep theirs."""
    if isinstance(module, Attention):
        return
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for child in module.children():
        init_vit(child)


def tie_mechanisms(network: nn.Module) -> None:
    """Lets mechanisms use parameters of earlier layers, as Linformer's `share: layerwise` does; see `Attention.tie`."""
    mechanisms = [module for module in network.modules() if isinstance(module, Attention)]
    for i, mechanism in enumerate(mechanisms):
        mechanism.tie(mechanisms[:i])
