"""Attention transplant: any mechanism of linvit in a model of timm, whose projections are kept."""

from collections.abc import Sequence
from typing import Any

from timm.layers import Attention, AttentionRope
from timm.models import beit, eva, pvt_v2, swin_transformer
from torch import nn

from linvit.backbones.base import tie_mechanisms
from linvit.backbones.blocks import specs_per_block
from linvit.backbones.transplanted import (
    PatchGrid,
    ReducedTransplant,
    TokenTransplant,
    Transplant,
    WindowTransplant,
)
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.registry import Spec

SUGGESTED = (
    "vit_tiny_patch16_224, deit_tiny_patch16_224, beit_base_patch16_224, pvt_v2_b0, swin_tiny_patch4_window7_224"
)
PLAIN = (Attention, AttentionRope, beit.Attention, eva.EvaAttention)
REPLACEABLE: tuple[type[nn.Module], ...] = (*PLAIN, pvt_v2.Attention, swin_transformer.WindowAttention)


def transplant(network: nn.Module, attention: Spec | Sequence[Spec], img_size: int | Sequence[int] = 224) -> nn.Module:
    """Replaces the attention of a timm model, in place, and keeps its projections.

    Images of other sizes work as far as the model takes them. Where a block is recomputed in the backward pass
    (`set_grad_checkpointing`), that pass must come before images of another size go forward.

    Args:
        network: ViT, DeiT, BEiT, EVA without rotary positions, PVTv2 or Swin, and what is built of the same modules.
        attention: One spec, or a list with one per stage or per block.
        img_size: Side, or (H, W), that mechanisms with parameters per token are built for, where the model takes any.

    Raises:
        UserError: If the model has no attention that can be replaced, or keeps something in it that has no place.
    """
    found = {name: module for name, module in network.named_modules() if type(module) in REPLACEABLE}
    if not found:
        raise UserError(
            f"{type(network).__name__} has no attention that linvit can replace; it mixes tokens by "
            f"{', '.join(token_mixers(network)) or 'nothing known'}. Leave attention out, or take a model such as "
            f"{SUGGESTED}"
        )
    for module in found.values():
        check_replaceable(network, module)
    patches = patch_grid(network, img_size) if any(isinstance(module, PLAIN) for module in found.values()) else None
    levels: list[dict[str, Any]] = list(network.feature_info)  # type: ignore[arg-type]
    depths = [sum(name.startswith(f"{level['module']}.") for name in found) for level in levels]
    if max(depths) == 1 or sum(depths) != len(found):  # timm calls every block of a plain transformer a level
        depths = [len(found)]
    for (name, source), spec in zip(found.items(), specs_per_block(attention, depths), strict=True):
        parent, _, leaf = name.rpartition(".")
        replacement: Transplant
        if isinstance(source, swin_transformer.WindowAttention):
            replacement = WindowTransplant(source, spec)
        elif patches is not None:
            replacement = TokenTransplant(source, spec, patches)
        else:
            stride = next(level["reduction"] for level in levels if name.startswith(f"{level['module']}."))
            height, width = image_size(img_size)
            replacement = ReducedTransplant(source, spec, (-(-height // stride), -(-width // stride)))
        setattr(network.get_submodule(parent), leaf, replacement)
    tie_mechanisms(network)
    return network


def check_replaceable(network: nn.Module, source: nn.Module) -> None:
    """Raises a `UserError` where an attention module does more than project and mix."""
    what = f"{type(network).__name__}'s {type(source).__name__}"
    if getattr(network, "rope", None) is not None:
        raise UserError(
            f"{what} turns q and k by rotary position embeddings, for which a mechanism has no place; take a model "
            f"with added position embeddings, such as {SUGGESTED}"
        )
    kept = {"qkv", "q_proj", "k_proj", "v_proj", "q_bias", "v_bias", "q_norm", "k_norm", "proj"}
    kept |= {"q", "kv", "sr", "norm"} if isinstance(source, pvt_v2.Attention) else {"relative_position_bias_table"}
    extra = sorted({name.partition(".")[0] for name, _ in source.named_parameters()} - kept)
    if extra:
        raise UserError(
            f"{what} also has {', '.join(extra)}, for which there is no place; take another model: {SUGGESTED}"
        )
    dim, inner = source.proj.out_features, source.proj.in_features  # type: ignore[union-attr]
    if dim != inner:
        raise UserError(f"{what} has heads of {inner} channels for tokens of {dim}; take another model: {SUGGESTED}")


def patch_grid(network: Any, img_size: int | Sequence[int]) -> PatchGrid:
    """Makes a model note the patch grid of its images."""
    patch_embed: Any = getattr(network, "patch_embed", None)
    if not hasattr(patch_embed, "dynamic_feat_size"):
        raise UserError(
            f"{type(network).__name__} has no patch embedding that tells the grid of its tokens; take a model such as "
            f"{SUGGESTED}"
        )
    size = getattr(patch_embed, "grid_size", None) or patch_embed.dynamic_feat_size(image_size(img_size))
    return PatchGrid(patch_embed, tuple(size), network.num_prefix_tokens)


def token_mixers(network: nn.Module) -> list[str]:
    """Classes of modules that bring tokens or pixels together: attention if there is any, or else windows of pixels."""
    modules = list(network.modules())
    attention = {type(module).__name__ for module in modules if hasattr(module, "num_heads")}
    windows = {type(module).__name__ for module in modules if getattr(module, "kernel_size", 1) not in (1, (1, 1))}
    return sorted(attention or windows)
