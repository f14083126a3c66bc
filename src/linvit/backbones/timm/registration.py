"""linvit's backbones in timm's registry: `timm.create_model("flatten_swin_tiny")` after `import linvit.backbones`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    model_entrypoint,
    register_model,
    resolve_pretrained_cfg,
)
from torch import Tensor, nn

from linvit.backbones.timm.attention import unwrapped
from linvit.backbones.timm.record import REPLACED, layout, name_in_timm, preparation
from linvit.errors import UserError
from linvit.layers.resize_tables import resize_tables
from linvit.registry import backbones
from linvit.registry.entries import restrict_imports_to
from linvit.registry.signatures import takes

default_cfgs = generate_default_cfgs(
    {**{name_in_timm(name): preparation(name) for name in backbones.names()}, REPLACED: {}}
)  # timm looks for this name


def register_with_timm() -> None:
    """Registers all names, including those of plug-ins; a backbone is imported on first use.

    A name that timm already uses gets a prefix, "linvit_pvt_v2_b0".
    """
    for name in backbones.names():
        if name not in ("timm", "transformers") and not timm.is_model(name_in_timm(name)):
            register_model(entrypoint(name_in_timm(name), lambda name=name, **options: build(name, **options)))
    if not timm.is_model(REPLACED):
        register_model(entrypoint(REPLACED, build_replaced))


def build(name: str, global_pool: str | None = None, **options: Any) -> nn.Module:
    """Builds a linvit backbone from timm's arguments, which may include the pooling."""
    if global_pool is not None and takes(backbones.get(name), "global_pool"):
        options["global_pool"] = global_pool
    network: Any = backbones.create({"name": name, **options})
    if hasattr(network, "check_pool") and global_pool is not None:
        network.check_pool(global_pool)
        network.global_pool = global_pool
    network._traits = {"first_conv": layout(network, (3, 224, 224)).get("first_conv")}
    return network  # type: ignore[no-any-return]


def build_replaced(model: str, replaced: Sequence[dict[str, Any]], **options: Any) -> nn.Module:
    """Builds a model of timm's registry and replaces its attention as often as before it was saved."""
    from linvit.backbones.replace_attention import replace_attention

    if not isinstance(model, str) or model == REPLACED or not timm.is_model(model):
        raise UserError(f"'{REPLACED}' replaces the attention of a model of timm's registry; {model!r} is not in it")
    network: nn.Module = model_entrypoint(model)(**options)
    for one in replaced:
        replace_attention(network, **one)
    return network


def for_grids(state: Mapping[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Returns the weights of a file with tables for the grids of a network, which may have another `img_size`."""
    height, width = network.pretrained_cfg["input_size"][1:]
    return resize_tables(network, state, (height, width))


def entrypoint(name: str, build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns the function with which timm creates a model of this name by a function of linvit."""

    def create(
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        cache_dir: str | None = None,
        drop_rate: float = 0.0,
        **options: Any,
    ) -> nn.Module:
        if drop_rate:
            raise UserError(
                f"'{name}' of linvit has no dropout before the classifier; got drop_rate={drop_rate}. "
                f"Use drop_path_rate or proj_drop"
            )
        if pretrained and not resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay).has_weights:
            raise UserError(
                f"timm has no weights for '{name}' of linvit. Create it with pretrained=False, then load the official "
                f"checkpoint: linvit.load_pretrained(model, PATH)"
            )
        features: dict[str, Any] = {"out_indices": 4, "feature_cls": "getter"}  # the last four: a whole pyramid

        def built(**arguments: Any) -> nn.Module:
            with restrict_imports_to(()):  # they may come from a file on the hub
                network: Any = build(**arguments)
            if "out_indices" not in options:  # timm reads it after building
                features["out_indices"] = min(4, len(getattr(network, "feature_info", range(4))))
            return network  # type: ignore[no-any-return]

        model: Any = build_model_with_cfg(
            built,
            name,
            pretrained=pretrained,
            pretrained_cfg=pretrained_cfg,
            pretrained_cfg_overlay=pretrained_cfg_overlay,
            feature_cfg=features,
            pretrained_filter_fn=for_grids,
            cache_dir=cache_dir,
            **options,
        )
        network = unwrapped(model) if options.get("features_only") else model
        found = layout(network, model.default_cfg.get("input_size", (3, 224, 224)))
        model.default_cfg.update({key: value for key, value in found.items() if model.default_cfg.get(key) is None})
        return model  # type: ignore[no-any-return]

    create.__name__ = create.__qualname__ = name
    return create
