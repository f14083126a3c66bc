"""Puts a mechanism of linvit into a model of timm or transformers and keeps its projections."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from linvit.backbones.initialise import tie_mechanisms
from linvit.backbones.stage import specs_per_layer
from linvit.backbones.timm.hiera import ReplacedHieraAttention
from linvit.backbones.timm.hosts import ACCEPTED, Model, ReplacedAttention
from linvit.backbones.timm.maps import ReplacedMaxViTAttention, ReplacedSAMAttention
from linvit.backbones.timm.record import record_replacement
from linvit.backbones.timm.reduced import ReplacedNextViTAttention, ReplacedPVTv2Attention
from linvit.backbones.timm.vit import ReplacedCaiTAttention, ReplacedViTAttention
from linvit.backbones.timm.windows import (
    ReplacedLeViTAttention,
    ReplacedSwinAttention,
    ReplacedSwinV2Attention,
    ReplacedTinyViTAttention,
    ReplacedTwinsAttention,
)
from linvit.backbones.transformers.hosts import (
    ReplacedTransformersAttention,
    family_of,
    is_transformers,
    why_refused,
)
from linvit.errors import UserError
from linvit.registry import Spec

HOSTS: tuple[type[ReplacedAttention], ...] = (
    ReplacedViTAttention,
    ReplacedCaiTAttention,
    ReplacedSAMAttention,
    ReplacedHieraAttention,
    ReplacedPVTv2Attention,
    ReplacedTwinsAttention,
    ReplacedNextViTAttention,
    ReplacedSwinAttention,
    ReplacedSwinV2Attention,
    ReplacedTinyViTAttention,
    ReplacedLeViTAttention,
    ReplacedMaxViTAttention,
)
REPLACEABLE: dict[type[nn.Module], Any] = {source: host for host in HOSTS for source in host.sources}


def host_of(module: nn.Module) -> Any:
    """Returns the class that replaces an attention module of timm or transformers; None for other modules."""
    return REPLACEABLE.get(type(module)) or (family_of(module) and ReplacedTransformersAttention)


def replace_timm_attention(
    network: nn.Module, attention: Spec | Sequence[Spec | None], img_size: int | Sequence[int] = 224
) -> None:
    """Replaces the attention of a model of timm or transformers, in place; see `linvit.replace_attention`."""
    network = unwrapped(network)
    found = {name: module for name, module in network.named_modules() if host_of(module)}
    if not found:
        raise UserError(_nothing_to_replace(network))
    specs = dict(zip(found, specs_per_layer(attention, network, found), strict=True))
    found = {name: module for name, module in found.items() if specs[name] is not None}
    for module in found.values():
        check_replaceable(network, module)
    model = Model(network, img_size)
    new = {name: host_of(source)(source, specs[name], model, name) for name, source in found.items()}
    for name, layer in new.items():
        network.set_submodule(name, layer.train(found[name].training))
    tie_mechanisms(network)
    record_replacement(network, attention, img_size)


def unwrapped(network: nn.Module) -> nn.Module:
    """Returns the model inside timm's wrapper for `features_only=True`; other models unchanged."""
    if not isinstance(network, nn.ModuleDict):
        return network
    if "model" not in network:
        raise UserError(
            f"timm's {type(network).__name__} has taken the model apart. Create it with feature_cls='getter', or "
            f"replace the attention of the whole model and call its forward_intermediates"
        )
    return network["model"]


def _nothing_to_replace(network: nn.Module) -> str:
    replaced = [module for module in network.modules() if isinstance(module, ReplacedAttention)]
    if replaced:
        return (
            f"the attention of this {type(network).__name__} has been replaced by "
            f"{type(replaced[0].mechanism).__name__}, which may have left out some of its weights. Replace that of a "
            f"fresh model, or of a copy.deepcopy of it"
        )
    if is_transformers(network):
        return why_refused(network)
    # A task or create_backbone has built timm's; others come from replace_attention, where nothing can be left out.
    ours = type(network).__module__.startswith(("timm.", "linvit."))
    way = f"Leave attention out, or {ACCEPTED}" if ours else f"Instead of this model {ACCEPTED}"
    return (
        f"{type(network).__name__} has no attention that linvit can replace; it mixes tokens by "
        f"{', '.join(token_mixers(network)) or 'nothing known'}. {way}"
    )


def check_replaceable(network: nn.Module, source: nn.Module) -> None:
    """Raises a `UserError` if an attention module does more than project and mix."""
    what = f"{type(network).__name__}'s {type(source).__name__}"
    extra = sorted({name.partition(".")[0] for name, _ in source.named_parameters()} - host_of(source).kept)
    if extra:
        raise UserError(f"{what} also has {', '.join(extra)}, which a mechanism does not support; {ACCEPTED}")
    dropout = getattr(getattr(source, "attn_drop", None), "p", 0)
    if dropout:
        raise UserError(
            f"{what} drops weights of its attention in training (rate {dropout:g}), and most mechanisms never form "
            f"them; create the model with attn_drop_rate=0"
        )


def token_mixers(network: nn.Module) -> list[str]:
    """Returns class names of modules that mix tokens: attention if there is any, else convolutions and pooling."""
    modules = list(network.modules())
    attention = {type(module).__name__ for module in modules if hasattr(module, "num_heads")}
    windows = {type(module).__name__ for module in modules if getattr(module, "kernel_size", 1) not in (1, (1, 1))}
    return sorted(attention or windows)
