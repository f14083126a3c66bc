"""linvit's backbones in timm's registry: `timm.create_model("flatten_swin_tiny")` after `import linvit.backbones`."""

from collections.abc import Callable
from typing import Any

import timm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from linvit.backbones.timm.attention import unwrapped
from linvit.errors import UserError
from linvit.model_info import model_info
from linvit.registry import backbones


def layout(network: Any, input_size: tuple[int, ...]) -> dict[str, Any]:
    """Returns what timm's `default_cfg` says of the modules of a model, as far as the model has them."""
    found: dict[str, Any] = {}
    names = {module: name for name, module in network.named_modules()}
    convolutions = [name for module, name in names.items() if isinstance(module, nn.Conv2d)]
    if convolutions:
        found["first_conv"] = convolutions[0]
    if hasattr(network, "get_classifier"):
        heads: Any = network.get_classifier()
        found["classifier"] = tuple(names[head] for head in heads) if isinstance(heads, tuple) else names[heads]
    if getattr(network, "feature_info", None):
        stride = network.feature_info[-1]["reduction"]
        found["pool_size"] = tuple(-(-side // stride) for side in input_size[1:])
    return found


def preparation(name: str) -> dict[str, Any]:
    """Returns how images are prepared for a backbone, where that differs from timm's defaults (224, 0.875, bicubic)."""
    facts = model_info().get(name)
    if facts is None:
        return {}
    size = (3, facts.img_size, facts.img_size)
    return {"input_size": size, "crop_pct": facts.crop_pct, "crop_mode": facts.crop_mode}


default_cfgs = generate_default_cfgs(
    {name: preparation(name) for name in backbones.names()}
)  # timm looks for this name


def register_with_timm() -> None:
    """Registers all names, those of plug-ins too, that timm does not have; a backbone is imported when it is used."""
    for name in backbones.names():
        if name != "timm" and not timm.is_model(name):
            register_model(entrypoint(name))


def entrypoint(name: str) -> Callable[..., nn.Module]:
    """Returns the function by which timm creates a backbone of linvit."""

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
                f"'{name}' of linvit drops no features of the classifier; got drop_rate={drop_rate}. "
                f"Use drop_path_rate or proj_drop"
            )
        if pretrained:
            raise UserError(
                f"timm has no weights for '{name}' of linvit. Create it with pretrained=False, then load the official "
                f"checkpoint: linvit.load_pretrained(model, PATH)"
            )
        features: dict[str, Any] = {"out_indices": 4, "feature_cls": "getter"}  # the last four: a whole pyramid

        def build(**arguments: Any) -> nn.Module:
            network: Any = backbones.create({"name": name, **arguments})
            if "out_indices" not in options:  # timm reads it after building
                features["out_indices"] = min(4, len(getattr(network, "feature_info", range(4))))
            return network  # type: ignore[no-any-return]

        model: Any = build_model_with_cfg(
            build,
            name,
            pretrained=False,
            pretrained_cfg=pretrained_cfg,
            pretrained_cfg_overlay=pretrained_cfg_overlay,
            feature_cfg=features,
            **options,
        )
        network = unwrapped(model) if options.get("features_only") else model
        found = layout(network, model.default_cfg.get("input_size", (3, 224, 224)))
        model.default_cfg.update({key: value for key, value in found.items() if model.default_cfg.get(key) is None})
        return model  # type: ignore[no-any-return]

    create.__name__ = create.__qualname__ = name
    return create
