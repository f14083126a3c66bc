"""Replaces the attention of a model that is already built: of linvit, timm or Hugging Face's transformers."""

from collections.abc import Sequence

from torch import nn

from linvit.attention.base import Attention
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.base import Backbone
from linvit.backbones.initialise import init_vit, tie_mechanisms
from linvit.backbones.stage import specs_per_layer
from linvit.backbones.timm.attention import host_of, replace_timm_attention, unwrapped
from linvit.backbones.timm.hosts import ReplacedAttention
from linvit.backbones.timm.record import record_replacement
from linvit.errors import UserError
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.projections import keep_weights
from linvit.layers.stripes import StripeAttention
from linvit.registry import Spec


def replace_attention(
    model: nn.Module, attention: Spec | Sequence[Spec | None], img_size: int | Sequence[int] = 224
) -> nn.Module:
    """Replaces the attention of a model, in place, and keeps all weights that another mechanism can use.

    A linvit backbone becomes what its constructor builds with `attention=`. Kept are the projections of q, k and v that
    the new mechanism also has, in equal widths, and the output projection; the parameters of another mechanism are new.

    In a timm model the norms of q and k stay as well, rotary positions, by which it turns q and k before the mechanism
    gets them, and a relative position bias where the mechanism takes one. It takes images of the sizes that it took
    before. Where blocks are recomputed in the backward pass (`set_grad_checkpointing`), that pass must come before
    images of another size go forward. The same holds for vision transformers of Hugging Face's transformers.

    Args:
        model: A backbone of linvit, any model of linvit's attention layers, or one of timm's or transformers' that
            docs/guides/timm.md and docs/guides/transformers.md list, or a model built from the same modules.
        attention: One spec, or a list with one per stage or per block, in which None keeps a block's attention.
        img_size: Side, or (H, W), that mechanisms with parameters per token are built for, in a timm or
            transformers model that takes any size. A model of linvit knows its own.

    Returns:
        The model.

    Raises:
        UserError: If the model has no attention that can be replaced, or if it does more than project and mix.

    Example:
        >>> model = timm.create_model("vit_small_patch16_224", pretrained=True)
        >>> linvit.replace_attention(model, "focused")
    """
    network = unwrapped(model)
    layers = {
        name: layer for name, layer in network.named_modules() if isinstance(layer, AttentionLayer | StripeAttention)
    }
    if not layers:
        replace_timm_attention(network, attention, img_size)
        return model
    for (name, layer), spec in zip(layers.items(), specs_per_layer(attention, network, layers), strict=True):
        if spec is None:
            continue
        if layer.like.func is not type(layer):
            raise UserError(
                f"{name} is a {type(layer).__name__} and has no way to build another like it; set `self.like` in its "
                f"constructor, as {layer.like.func.__name__} does"
            )
        new: nn.Module = layer.like(attention=spec)
        if isinstance(network, Backbone):
            network.init_attention(name, new)
        else:
            init_vit(new)
        keep_weights(layer, new.to(layer.proj.weight))
        network.set_submodule(name, new.train(layer.training))
    tie_mechanisms(network)
    record_replacement(network, attention, img_size)
    return model


def softmax_blocks(model: nn.Module) -> int | None:
    """Counts blocks whose attention is softmax over all tokens that it gets, which in Swin are those of a window.

    Returns:
        Their number, or None if the model has no attention of linvit, and none that `replace_attention` takes.
    """
    hosts = {
        layer: [one for one in layer.modules() if isinstance(one, Attention)]
        for layer in model.modules()
        if isinstance(layer, AttentionLayer | StripeAttention | ReplacedAttention) or host_of(layer)
    }  # attention of timm has no mechanism, and is softmax
    softmax = [all(isinstance(one, SoftmaxAttention) for one in mechanisms) for mechanisms in hosts.values()]
    return sum(softmax) if softmax else None
