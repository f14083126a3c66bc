"""Resizes the tables of a checkpoint, such as positions, to the grids of a model."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed_nhwc, resize_rel_pos_bias_table
from torch import Tensor, nn

from linvit.attention.ops.functional import SizeOf, grid_from_count, resize_table


def resize_tables(model: nn.Module, state: Mapping[str, Tensor], img_size: tuple[int, int] | None) -> dict[str, Tensor]:
    """Resizes the tables of a state dict, under the model's names, where possible.

    Each module with a method `resize_tables` resizes its own entries; see `linvit.Attention.resize_tables`. timm's
    modules have none, so `resize_timm_tables` does it for them. A module whose tokens form windows has a method
    `size_in_checkpoint(count, size_of)`, which replaces `size_of` for the module and its parts.
    """
    resized = dict(state)
    own = {} if img_size else {name: tensor.shape for name, tensor in model.state_dict().items()}

    def visit(module: nn.Module, prefix: str, size_of: SizeOf) -> None:
        inner_size_of: Any = getattr(module, "size_in_checkpoint", None)
        if inner_size_of is not None:
            size_of = partial(inner_size_of, size_of=size_of)
        method = getattr(module, "resize_tables", None) or partial(resize_timm_tables, module)
        entries = {
            name.removeprefix(prefix): tensor
            for name, tensor in resized.items()
            if name.startswith(prefix) and own.get(name) != tensor.shape
        }
        resized.update({prefix + name: tensor for name, tensor in method(entries, size_of).items()})
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", size_of)

    visit(model, "", partial(grid_from_count, img_size=img_size or (1, 1)))
    return resized


def resize_timm_tables(module: nn.Module, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
    """Resizes timm's position embeddings and tables of relative positions as timm does when it loads them.

    Embeddings are resized bicubic and antialiased, tables of square windows by `timm.layers.resize_rel_pos_bias_table`,
    and those of each axis (MViTv2, SAM) linearly.
    """
    for name, patches in {"pos_embed": "patch_embed", "patch_pos": "pixel_embed"}.items():  # patch_pos is TNT's
        own, embed = getattr(module, name, None), getattr(module, patches, None)
        size = getattr(embed, "grid_size", None) or getattr(module, "tokens_spatial_shape", None)  # for Hiera
        if embed is None or name not in state or not isinstance(own, Tensor):
            continue
        given = state[name]
        if own.ndim < 4 and size is not None:
            state[name] = resize_table(given, own, tuple(size), size_of, antialias=True)
        elif given.shape == own.shape or not given.numel() or {given.ndim, own.ndim} != {4} or len(given) != len(own):
            continue
        elif given.shape[3] == own.shape[3] != own.shape[2]:  # (1, H, W, C) of VOLO and SAM
            state[name] = resample_abs_pos_embed_nhwc(given, [*own.shape[1:3]])
        elif given.shape[1] == own.shape[1]:  # (1, C, H, W) of PiT
            given = resample_abs_pos_embed_nhwc(given.permute(0, 2, 3, 1), [*own.shape[2:]])
            state[name] = given.permute(0, 3, 1, 2)
    for name in {"rel_pos_h", "rel_pos_w"} & state.keys():
        own, given = getattr(module, name, None), state[name]
        if isinstance(own, Tensor) and given.numel() and given.shape[1:] == own.shape[1:] and len(given) != len(own):
            state[name] = F.interpolate(given.float().mT[None], len(own), mode="linear")[0].mT
    window, name = getattr(module, "window_size", None), "relative_position_bias_table"
    if window is not None and name in state and isinstance(own := getattr(module, name, None), Tensor):
        given, span = state[name], math.prod(2 * side - 1 for side in window)
        places = len(given) - (len(own) - span)  # without those of a class token
        if given.ndim == own.ndim == 3 or (given.ndim == 2 and places > 0 and math.isqrt(places) ** 2 == places):
            state[name] = resize_rel_pos_bias_table(given, tuple(window), own.shape)
    return state
