"""Any timm model as a backbone or a feature pyramid, with its own attention or any of linvit's.

Backbones of linvit keep timm's contract, so a timm model is used as it is.
"""

from collections.abc import Sequence
from typing import Any

import timm
import timm.models
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from timm.layers import PatchEmbed
from torch import nn

from linvit.backbones.timm.attention import replace_timm_attention
from linvit.errors import UserError, did_you_mean
from linvit.registry import Spec

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # files that timm looks for
TIMEOUT = 10.0  # seconds


def timm_backbone(
    model: str,
    in_chans: int = 3,
    num_classes: int = 1000,
    img_size: int | Sequence[int] = 224,
    attention: Spec | Sequence[Spec] | None = None,
    drop_path_rate: float = 0.0,
    pretrained: bool = False,
    features_only: bool = False,
    out_indices: Sequence[int] | None = None,
    dynamic_img_size: bool = False,
) -> nn.Module:
    """Creates a timm model with its own attention, or with another one between its q, k, v and output projections.

    Args:
        model: timm's name, such as "resnet18", "vit_tiny_patch16_224" or "swin_tiny_patch4_window7_224".
        in_chans: Image channels.
        num_classes: Classes; 0 for features.
        img_size: Side or (H, W), for models of a fixed input size; the others accept any size.
        attention: Replacement of the model's attention: one spec, or a list with one per stage or per block (see
            `linvit.replace_attention`). None keeps the model's own.
        drop_path_rate: Stochastic depth, for models that have it (0 leaves the model's default).
        pretrained: Load timm's weights (from its hub, or its cache). A file of them is for `linvit.load_pretrained`, or
            `--model.pretrained=FILE` on the command line.
        features_only: Return a feature pyramid (a list of (B, C, H, W)) instead of logits.
        out_indices: Which levels of the pyramid; None means all.
        dynamic_img_size: Let a model of a fixed input size also accept images of other sizes, if it can.

    Example:
        >>> linvit.create_backbone({"name": "timm", "model": "resnet18"}, num_classes=10, img_size=64)
        >>> linvit.create_backbone({"name": "timm", "model": "vit_small_patch16_224"}, attention="focused")
    """
    architecture = model.partition(".")[0]
    if not timm.is_model(architecture):
        raise UserError(
            f"timm {timm.__version__} has no model '{model}'.{did_you_mean(architecture, timm.list_models())} "
            f"All names: python -c 'import timm; print(timm.list_models())'"
        )
    config = timm.models.get_pretrained_cfg(architecture)
    fixed = config is not None and config.fixed_input_size
    if pretrained:
        _check_weights(model)
    options: dict[str, Any] = {"num_classes": num_classes, "drop_path_rate": drop_path_rate or None}
    options["img_size"] = img_size if fixed else None
    if features_only:  # keeps the model whole if it has an attention to replace
        wrapper = None if attention is None else "getter"
        options |= {"features_only": True, "out_indices": out_indices, "feature_cls": wrapper, "num_classes": None}
    options = {name: value for name, value in options.items() if value is not None}
    network = create_timm_model(model, pretrained, dynamic_img_size and fixed, in_chans=in_chans, **options)
    if attention is not None:
        replace_timm_attention(network, attention, img_size)
    return network


def _check_weights(model: str) -> None:
    """Raises a `UserError` unless the weights of a timm model are in the cache or can be downloaded.

    Without this check, timm tries to download them for most of a minute.
    """
    config = timm.models.get_pretrained_cfg(model)
    if config is None or not config.hf_hub_id:
        return  # timm reports what it has
    repository = config.hf_hub_id
    files = [config.hf_hub_filename] if config.hf_hub_filename else list(WEIGHTS)
    if any(isinstance(try_to_load_from_cache(repository, file), str) for file in files):
        return
    address = hf_hub_url(repository, files[0])
    try:
        get_hf_file_metadata(address, timeout=TIMEOUT)
    except EntryNotFoundError:
        return  # the other file exists
    except Exception as error:  # of several libraries
        raise UserError(
            f"timm's weights of '{model}' (model.backbone.pretrained) are not on this machine, and the hub cannot be "
            f"reached: {' '.join(str(error).split())[:200]}. Download {address} where there is a network, then give "
            f"the file: --model.backbone.pretrained=false --model.pretrained=FILE, linvit analyze --pretrained FILE, "
            f"or of a teacher, linvit linearize --teacher FILE --model.backbone='{{name: timm, model: {model}}}'"
        ) from error


def create_timm_model(model: str, pretrained: bool, dynamic_img_size: bool, **options: Any) -> nn.Module:
    """Creates a timm model; with `dynamic_img_size` it accepts images of any size, if the model supports it."""
    ways: tuple[dict[str, Any], ...] = ({"dynamic_img_size": True}, {"strict_img_size": False})  # option names vary
    for way in ways if dynamic_img_size else ():
        try:
            network: nn.Module = timm.create_model(model, pretrained=pretrained, **options, **way)
        except TypeError as error:
            if not any(name in str(error) for name in way):
                raise
        else:
            for module in network.modules():
                if isinstance(module, PatchEmbed):
                    module.dynamic_img_pad = True  # to whole patches
            return network
    return timm.create_model(model, pretrained=pretrained, **options)
