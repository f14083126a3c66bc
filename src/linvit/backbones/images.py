"""Calls any network with images of several sizes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone
from linvit.backbones.packing import as_batch, by_size, pack
from linvit.backbones.stage import uncompiled
from linvit.backbones.timm.vit import ReplacedViTAttention
from linvit.errors import UserError


def forward_images(network: Any, images: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns the logits (B, K) of images (B, C, H, W), or of a list of images (C, H, W) of any sizes.

    Each image of a list gets what it gets alone. Those of several sizes are packed without padding in linvit's plain
    transformers (DeiT and its presets), and in timm's `VisionTransformer` and `NaFlexVit` where all attention is
    replaced. timm's models with a custom attention class, rotary positions, or stochastic depth in training run the
    images of each size as a batch.

    Raises:
        UserError: If the images differ in size and the network is another, such as a pyramid.

    Example:
        >>> network = linvit.create_backbone("deit_small", attention="linear", num_classes=10)
        >>> linvit.forward_images(network, [torch.randn(3, 224, 160), torch.randn(3, 96, 320)]).shape
        torch.Size([2, 10])
    """
    batch = images if isinstance(images, Tensor) else as_batch(images)
    if batch is not None:
        return network(batch)  # type: ignore[no-any-return]
    # also in DistributedDataParallel or as returned by torch.compile
    if isinstance(getattr(network, "module", getattr(network, "_orig_mod", network)), Backbone):
        return network(images)  # type: ignore[no-any-return]
    if not isinstance(network, VisionTransformer | NaFlexVit):
        raise UserError(
            f"{type(network).__name__} takes images of one size, and got a list of several. Resize them to one size, "
            f"or take a plain transformer: deit_small, or timm's ViT and NaFlexVit"
        )
    return _packed_by_timm(network, images)  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _packed_by_timm(network: Any, images: Sequence[Tensor]) -> Tensor:
    if isinstance(network, VisionTransformer) and not network.dynamic_img_size:
        raise UserError("this VisionTransformer takes images of one size; create it with dynamic_img_size: true")
    layers = [getattr(block, "attn", None) for block in network.blocks]  # none in parallel blocks
    if not all(isinstance(layer, ReplacedViTAttention) for layer in layers) or _by_batch(network):
        alike = by_size(images)
        logits = torch.cat([network(torch.stack([images[i] for i in own])) for own in alike])
        places = [i for own in alike for i in own]
        return logits[sorted(range(len(places)), key=places.__getitem__)]
    patches: Any = network.blocks[0].attn.patches
    before = patches.grid
    x, packed = pack(partial(_embedded, network, patches), images)
    patches.grid = before

    def run(block: nn.Module, x: Tensor) -> Tensor:
        patches.grid = packed  # also when a checkpoint runs it again, after other images
        try:
            return uncompiled(block, x)
        finally:
            patches.grid = before

    for block in network.blocks:
        checkpointing = network.grad_checkpointing and network.training
        x = checkpoint(run, block, x, use_reentrant=False) if checkpointing else run(block, x)
    return packed.restore(torch.cat([network.forward_head(part) for part in packed.split(network.norm(x))]))


def _by_batch(network: nn.Module) -> bool:
    """True if a model of timm does something for each image of a batch that it would do for a whole pack."""
    dropped = network.training and any(isinstance(m, DropPath) and m.drop_prob for m in network.modules())
    layers = (m for m in network.modules() if isinstance(m, ReplacedViTAttention))
    return bool(dropped) or getattr(network, "rope", None) is not None or any(m.drops_patches for m in layers)


def _embedded(network: Any, patches: Any, images: Tensor) -> tuple[Tensor, Grid]:
    """Embeds images of one size as timm's model does before its blocks."""
    if isinstance(network, NaFlexVit):
        x = network._forward_embeds(images, None, None, None)["patches"]
    else:
        x = network.norm_pre(network._pos_embed(network.patch_embed(images)))
    return x, patches.grid
