"""Any vision transformer of Hugging Face's transformers as a backbone, with its own attention or any of linvit's."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone
from linvit.backbones.initialise import classifier
from linvit.backbones.timm.attention import replace_timm_attention
from linvit.backbones.transformers.hosts import REPLACED, family_of, why_refused
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.registry import Spec

NORMS = ("layernorm", "norm", "post_layernorm")
"""Names of the final norm of models."""
UNUSED = ("architectures", "dtype", "id2label", "label2id", "transformers_version")
"""Entries of a config that the backbone does not depend on."""


def import_transformers() -> Any:
    """Returns the package transformers; raises a `UserError` if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("models of transformers need transformers: pip install 'linvit[transformers]'") from error
    return transformers


def read_config(model: str) -> dict[str, Any]:
    """Returns config.json of a folder or of a model of the hub: entries of its vision tower, defaults left out."""
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(model)
    except Exception as error:  # of several libraries
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"'{model}' has no config of transformers: {reason}. Name a folder or a model of it") from error
    config = getattr(config, "vision_config", config)
    return {name: value for name, value in config.to_diff_dict().items() if name not in UNUSED}


def read_images(model: str) -> dict[str, Any]:
    """Returns how a model's image processor prepares images, as options of data modules; empty without its file."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        found: Any = ImageProcessingMixin.get_image_processor_dict(model)[0]
    except OSError:  # has no file
        return {}
    images = {to: found[name] for name, to in (("image_mean", "mean"), ("image_std", "std")) if name in found}
    sizes = [found.get(name) for name in ("size", "crop_size")]
    whole, crop = ((each,) if isinstance(each, int) else tuple((each or {}).values()) for each in sizes)
    if found.get("do_center_crop") and crop and whole:
        images |= {"img_size": [crop[0], crop[-1]], "crop_pct": min(1.0, crop[0] / whole[0]), "crop_mode": "center"}
    elif len(whole) == 2:
        images |= {"img_size": list(whole), "crop_pct": 1.0, "crop_mode": "squash"}
    return images


class TransformersBackbone(Backbone):
    """A vision model of transformers with timm's contract; the classifier is new.

    Features are the class token or, where the model has none, the mean of the patches; those of SigLIP and BEiT are
    pooled by their own modules. Images of any size are taken: positions are interpolated.

    Args:
        model: A folder that `save_pretrained` wrote, or a name of the hub, such as "facebook/dinov2-small".
        config: Its config as a mapping, which is then not read: checkpoints need no other file.
        in_chans: Image channels.
        num_classes: Classes; 0 for features.
        img_size: Side or (H, W), which mechanisms with parameters per token are made for in models of any image size.
        attention: What replaces the model's attention; see `linvit.replace_attention`. None is the model's own.
        drop_path_rate: Stochastic depth, for models that have it.
        pretrained: Load the weights of `model`.

    Attributes:
        hosted: The model of transformers.

    Raises:
        UserError: If transformers is not installed, or its model is of no family that linvit knows.

    Example:
        >>> linvit.create_backbone({"name": "transformers", "model": "facebook/dinov2-small", "pretrained": True})
    """

    levels = "blocks"

    def __init__(
        self,
        model: str,
        config: Mapping[str, Any] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec | None] | None = None,
        drop_path_rate: float = 0.0,
        pretrained: bool = False,
    ) -> None:
        options = {**(read_config(model) if config is None else config), "num_channels": in_chans}
        if drop_path_rate:
            if "drop_path_rate" not in options:
                raise UserError(f"'{model}' has no stochastic depth: set drop_path_rate to 0")
            options["drop_path_rate"] = drop_path_rate
        if REPLACED in options:
            raise UserError(
                f"'{model}' is a student, which linvit.load_transformers('{model}') loads; name its teacher"
            )
        hosted = _build(model, options, pretrained)
        family = next((known for module in hosted.modules() if (known := family_of(module))), None)
        if family is None or "num_frames" in options:
            raise UserError(f"'{model}' takes videos, and linvit images" if family else why_refused(hosted))
        width, prefix = hosted.config.hidden_size, family.prefix + getattr(hosted.config, "num_register_tokens", 0)
        super().__init__(num_classes, width, "token" if family.prefix else "avg", prefix)
        self.family, self.hosted, self.in_chans = family, hosted, in_chans
        self.patch_size, size = image_size(hosted.config.patch_size), image_size(hosted.config.image_size)
        self.default_cfg = {"input_size": (in_chans, *size)}
        self.norm_name = next(name for name in NORMS if hasattr(hosted, name))
        self.norm = getattr(hosted, self.norm_name)
        setattr(hosted, self.norm_name, nn.Identity())
        self.head = classifier(width, num_classes)
        names = [name for name, module in self.named_modules() if module in [*self.blocks]]
        self.feature_info = [{"module": name, "num_chs": width, "reduction": self.patch_size[0]} for name in names]
        hosted.use_head = False  # of SigLIP, which `pool` applies
        if hasattr(hosted.config, "mask_ratio"):  # of ViTMAE, which leaves patches out
            hosted.config.mask_ratio = 0.0
        for name, parameter in hosted.named_parameters():
            pooler = name.startswith("pooler.") and family.pooled_by != "pooler"
            if pooler or "mask_token" in name:  # which features do not depend on
                parameter.requires_grad_(False)
        if attention is not None:
            replace_timm_attention(self, attention, img_size)

    @property
    def config(self) -> Any:
        """Config of the model of transformers."""
        return self.hosted.config

    @property
    def blocks(self) -> nn.ModuleList:
        """Blocks of the model."""
        return next(module for module in self.hosted.modules() if isinstance(module, nn.ModuleList))

    @property
    def cls_token(self) -> Tensor | None:
        """Class token; None if the model has none."""
        own = dict(self.hosted.named_parameters())
        return next((own[name] for name in own if name.endswith(("cls_token", "class_embedding"))), None)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the model of transformers, without the classifier, for `linvit.load_transformers`."""
        setattr(self.hosted, self.norm_name, self.norm)
        self.hosted.save_pretrained(folder)
        setattr(self.hosted, self.norm_name, nn.Identity())

    def run(self, x: Tensor, **options: Any) -> Any:
        """Returns the output of the model of transformers for images (B, C, H, W)."""
        self.check_channels(x)
        if not self.family.any_size and tuple(x.shape[-2:]) != self.default_cfg["input_size"][1:]:
            options["interpolate_pos_encoding"] = True
        if hasattr(self.hosted.config, "mask_ratio"):  # patches stay in their order
            count = self.grid(x).num_queries - self.num_prefix_tokens
            options["noise"] = torch.arange(count, device=x.device).expand(len(x), -1)
        return self.hosted(pixel_values=x, **options)

    def grid(self, x: Tensor) -> Grid:
        """Returns the grid of images (B, C, H, W)."""
        height, width = x.shape[-2] // self.patch_size[0], x.shape[-1] // self.patch_size[1]
        return Grid((height, width), num_prefix=self.num_prefix_tokens)

    def forward_levels(
        self, x: Tensor, take: Collection[int] = (), stop: int | None = None
    ) -> tuple[Tensor, Grid, list[tuple[Tensor, Grid]]]:
        """Runs images through all blocks; see `Backbone.forward_levels`."""
        found: dict[int, Tensor] = {}
        kept = {*take} if stop is None else {*take, stop - 1}
        hooks = [
            self.blocks[level].register_forward_hook(lambda *given, level=level: found.update({level: given[-1]}))
            for level in kept
        ]  # own ones, as `output_hidden_states` keeps those of all blocks and fails in copies
        try:
            last = self.run(x).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        grid = self.grid(x)
        return last if stop is None else found[stop - 1], grid, [(found[level], grid) for level in sorted(take)]

    def pool(self, x: Tensor) -> Tensor:
        """Pools tokens (B, N, C) to one feature per image (B, C)."""
        own = self.family.pooled_by
        return getattr(self.hosted, own)(x) if own else super().pool(x)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switches gradient checkpointing, which saves memory and computes activations of blocks twice."""
        self.grad_checkpointing = enable
        (self.hosted.activation_checkpointing_enable if enable else self.hosted.activation_checkpointing_disable)()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Returns timm's layer groups for layer-wise learning rates: one per block."""
        block = str(self.feature_info[0]["module"]).removesuffix("0").replace(".", r"\.")
        last = (r"^(?:norm|hosted\.(?:head|pooler))\.", (99999,))
        return {"stem": r"^hosted\..*embedding", "blocks": [(rf"^{block}(\d+)", None), last]}


def _build(model: str, options: Mapping[str, Any], pretrained: bool) -> Any:
    """Returns the model of a config, with the weights of a folder or the hub if `pretrained`, in float32."""
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.for_model(**options)
        if not pretrained:
            return transformers.AutoModel.from_config(config, dtype=torch.float32)
        return transformers.AutoModel.from_pretrained(model, config=config, dtype=torch.float32).train()
    except Exception as error:  # of several libraries
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"transformers cannot build '{model}': {type(error).__name__}: {reason}") from error
