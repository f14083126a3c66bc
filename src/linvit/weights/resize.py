"""Tables of fixed length in a checkpoint, brought to the grids of a model by the modules that own them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from linvit.attention.ops.tables import SizeOf, grid_of_image, resize_table
from linvit.layers.relative_positions import resize_position_table


def resize_tables(model: nn.Module, state: Mapping[str, Tensor], image: tuple[int, int] | None) -> dict[str, Tensor]:
    """A state dict, under the model's names, whose tables are resized as far as they can be.

    Each module that has a method `resize_tables` resizes its own entries; see `linvit.Attention.resize_tables`. timm's
    modules have none, so `resize_timm_tables` acts for them. A module whose tokens are those of windows has a method
    `size_in_checkpoint(count, size_of)`, which replaces `size_of` for itself and what is in it.

    Args:
        model: Its modules are asked, from the outside in.
        state: The checkpoint's.
        image: Size (H, W) of the images that the checkpoint is of; only the ratio counts. None if that is not known:
            then they are taken for square, and what has the model's shape is left as it is.
    """
    resized = dict(state)
    own = {} if image else {name: tensor.shape for name, tensor in model.state_dict().items()}

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

    visit(model, "", partial(grid_of_image, image=image or (1, 1)))
    return resized


def resize_timm_tables(module: nn.Module, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
    """Bicubic interpolation of timm's position embeddings, and of the relative positions in its square windows."""
    size = getattr(getattr(module, "patch_embed", None), "grid_size", None)
    if size is not None and "pos_embed" in state and isinstance(own := getattr(module, "pos_embed", None), Tensor):
        state["pos_embed"] = resize_table(state["pos_embed"], own, tuple(size), size_of)
    window, name = getattr(module, "window_size", None), "relative_position_bias_table"
    if window is not None and name in state and isinstance(own := getattr(module, name, None), Tensor):
        square = partial(grid_of_image, image=(1, 1))
        state[name] = resize_position_table(state[name], own, tuple(window), square)
    return state
