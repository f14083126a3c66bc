"""Resizes the tables of a checkpoint, such as position embeddings, through the modules of the model that own them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from linvit.attention.ops.tables import SizeOf, grid_from_count, resize_table
from linvit.layers.relative_positions import resize_position_table


def resize_tables(model: nn.Module, state: Mapping[str, Tensor], img_size: tuple[int, int] | None) -> dict[str, Tensor]:
    """Resizes the tables of a state dict, under the model's names, as far as they can be resized.

    Each module that has a method `resize_tables` resizes its own entries; see `linvit.Attention.resize_tables`. timm's
    modules have none, so `resize_timm_tables` acts for them. A module whose tokens are those of windows has a method
    `size_in_checkpoint(count, size_of)`, which replaces `size_of` for itself and what is in it.

    Args:
        model: The model, whose modules are visited from the outside in.
        state: The checkpoint's tensors.
        img_size: Size (H, W) of the images that the checkpoint was trained on; only the ratio counts. None if it is not
            known: then they are taken for square, and a tensor of the model's shape stays as it is.
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
    """Resizes timm's position embeddings and the relative positions of its square windows (bicubic)."""
    size = getattr(getattr(module, "patch_embed", None), "grid_size", None)
    if size is not None and "pos_embed" in state and isinstance(own := getattr(module, "pos_embed", None), Tensor):
        state["pos_embed"] = resize_table(state["pos_embed"], own, tuple(size), size_of)
    window, name = getattr(module, "window_size", None), "relative_position_bias_table"
    if window is not None and name in state and isinstance(own := getattr(module, name, None), Tensor):
        square = partial(grid_from_count, img_size=(1, 1))
        state[name] = resize_position_table(state[name], own, tuple(window), square)
    return state
