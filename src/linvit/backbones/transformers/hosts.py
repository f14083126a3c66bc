"""Attention of Hugging Face's vision transformers, replaced as that of timm's models; nothing imports transformers."""

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import MapGrid, Model, ReplacedAttention
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.registry import Spec


class Family(NamedTuple):
    """Facts of the models with one class of attention.

    Attributes:
        name: Name of the family.
        prefix: Class and distillation tokens before the patches; register tokens of the configuration follow.
        any_size: True if a model takes images of any size without `interpolate_pos_encoding`.
        pooled_by: Module that pools the tokens, where it is more than to take the class token or the mean.
        placeless: Reason why its tokens form no plane, so that mechanisms must not depend on positions.
    """

    name: str
    prefix: int
    any_size: bool = False
    pooled_by: str = ""
    placeless: str = ""


REPLACED = "linvit_replaced"
"""The entry of a config with arguments of `linvit.replace_attention`, one mapping per call."""
RANDOM_PATCHES = "its encoder gets patches in random order, and some of them"
FAMILIES = {
    "ViTAttention": Family("ViT", 1),
    "DeiTAttention": Family("DeiT", 2),
    "ViTMSNAttention": Family("ViT-MSN", 1),
    "Dinov2Attention": Family("DINOv2", 1, any_size=True),
    "Dinov2WithRegistersAttention": Family("DINOv2 with registers", 1, any_size=True),
    "DINOv3ViTAttention": Family("DINOv3 ViT", 1, any_size=True),
    "SiglipAttention": Family("SigLIP", 0, pooled_by="head"),
    "CLIPAttention": Family("CLIP", 1),
    "IJepaAttention": Family("I-JEPA", 0),
    "MetaClip2Attention": Family("MetaCLIP 2", 1),
    "BeitAttention": Family("BEiT", 1, pooled_by="pooler"),
    "ViTMAEAttention": Family("ViTMAE", 1, placeless=RANDOM_PATCHES),
    "VideoMAEAttention": Family("VideoMAE", 0, placeless="its tokens are of several frames"),
}
"""Families by the class of their attention in transformers 5."""

REFUSED = {
    "its positions are added or turned within its own attention": ("Data2VecVision", "Sam", "VJEPA2"),
    "it attends in windows": ("Swin", "Hiera"),
    "its keys are reduced, and its attention does not get the size of the map": ("Pvt", "Segformer"),
    "its images have several sizes, and its attention gets a mask in their place": ("Siglip2", "Qwen", "Pixtral"),
    "its detection tokens follow the patches": ("Yolos",),
}
"""How names of classes begin, by the reason to refuse them."""


def family_of(module: nn.Module) -> Family | None:
    """Returns the family of an attention module of transformers that looks at patches; None of any other module."""
    config = getattr(module, "config", None) or getattr(getattr(module, "attention", None), "config", None)
    own = type(module).__module__.startswith("transformers.models.") and hasattr(config, "patch_size")
    return FAMILIES.get(type(module).__name__) if own else None  # CLIP's text has the class, and no patches


def is_transformers(network: nn.Module) -> bool:
    """Returns whether a network is made of modules of transformers, but not of timm by way of transformers."""
    names = [type(module).__module__ for module in network.modules()]
    return any(name.startswith("transformers.") for name in names) and not any(n.startswith("timm.") for n in names)


def why_refused(network: nn.Module) -> str:
    """Returns the reason why no attention of a network of transformers can be replaced."""
    classes = {type(module).__name__ for module in network.modules()}
    reasons = (why for why, starts in REFUSED.items() if any(name.startswith(starts) for name in classes))
    names = ", ".join(dict.fromkeys(family.name for family in FAMILIES.values()))
    return (
        f"linvit cannot replace the attention of {type(network).__name__} of transformers: "
        f"{next(reasons, 'linvit does not know it')}. Families that it knows: {names}"
    )


def part_of(module: Any, *names: str) -> Any:
    """Returns the first part of a module that exists of those named; None if there is none."""
    return next((getattr(module, name) for name in names if getattr(module, name, None) is not None), None)


def output_projection(layer: Any) -> Any:
    """Returns the output projection of an attention layer of linvit, timm or transformers; None if there is none."""
    return part_of(getattr(layer, "output", layer), "proj", "o_proj", "out_proj", "dense")  # VideoMAE: output.dense


class ReplacedTransformersAttention(ReplacedAttention):
    """Replaces the attention of the families above, among all tokens, prefix first.

    Where the model has rotary positions (DINOv3), it turns q and k by its own tables before the mechanism gets them.
    """

    sources = ()  # by name: FAMILIES
    kept: ClassVar[set[str]] = {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "attention", "output"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        family = family_of(source)
        assert family is not None
        what, within = type(model.network).__name__, getattr(source, "attention", source)
        config = within.config
        self.returns_weights = within is source  # and not the output alone
        if dropout := part_of(within, "attention_dropout", "dropout_prob", "dropout"):
            raise UserError(
                f"{what} drops weights of its attention in training (rate {dropout:g}), and most mechanisms never "
                f"form them. Set attention_dropout or attention_probs_dropout_prob of its config to 0"
            )
        prefix = family.prefix + getattr(config, "num_register_tokens", 0)
        size = model.img_size if family.any_size else image_size(config.image_size)
        patch = image_size(config.patch_size)
        nominal = Grid((size[0] // patch[0], size[1] // patch[1]), num_prefix=prefix)
        placeless = bool(family.placeless) and ".decoder_layers." not in f".{name}"
        parts = {f"{word[0]}_proj": part_of(within, f"{word[0]}_proj", word) for word in ("query", "key", "value")}
        heads, proj = part_of(within, "num_heads", "num_attention_heads"), output_projection(source)
        width = proj.in_features // heads
        linear = SimpleNamespace(**parts, proj=proj, num_heads=heads, head_dim=width, rotate_half=True)
        super().__init__(linear, spec, nominal)
        self.patches = None if placeless else self.grid_of(model, name, patch, nominal)
        self.num_prefix = prefix
        self.proj_drop = getattr(getattr(source, "output", None), "dropout", nn.Identity())
        if placeless and self.looks_at_places:
            raise UserError(
                f"{what}: {family.placeless}, and {type(self.mechanism).__name__} looks at their places (equivariant "
                f"is False). Take one that does not, such as linear"
            )
        self.biased = type(source).__name__ == "BeitAttention"
        if self.biased and not self.mechanism.host.accepts_bias:
            model.parent(name).relative_position_bias = None  # of N x N entries, for nothing
        if type(source).__name__ == "DINOv3ViTAttention":
            self.refuse_second_rotation(what)

    @staticmethod
    def grid_of(model: Model, name: str, patch: tuple[int, int], nominal: Grid) -> MapGrid:
        """Returns what records the grid of the images, at the convolution that embeds patches nearest to a layer."""
        found = {
            path: module
            for path, module in model.network.named_modules()
            if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride == patch
        }
        shared = {path: sum(map(str.__eq__, path.split("."), name.split("."))) for path in found}
        return model.map_from(found[max(found, key=lambda path: shared[path])], nominal)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Any:
        """(B, N, C) -> (B, N, C), in a pair with None in place of weights where the model expects a pair.

        `position_embeddings` are cosines and sines (H W, d) of the patches. A mask is BEiT's bias (1, h, N, N), which
        mechanisms that take one get; others are refused.
        """
        bias = None
        if self.biased and attention_mask is not None and attention_mask.is_floating_point():
            bias, attention_mask = attention_mask, None
        refuse_options(self, (), {"attention_mask": attention_mask, **options})
        row = Grid((1, hidden_states.shape[1] - self.num_prefix), num_prefix=self.num_prefix)
        grid = row if self.patches is None else self.patches.grid
        rope = None if position_embeddings is None else torch.cat(position_embeddings[::-1], -1)
        out = self.mix(hidden_states, grid, rope=rope, bias=bias)
        return (out, None) if self.returns_weights else out


def note_replacement(network: Any, replaced: Mapping[str, Any]) -> None:
    """Notes in a model's config how its attention was replaced, for `linvit.load_transformers`; has it refuse masks.

    The models within it refuse them as well, since BEiT adds masks to a bias, which some mechanisms go without.
    """
    if not hasattr(network.config, REPLACED):
        new: dict[int, Any] = {}  # copies of configs, which other models may share, by the id of the config
        copy.deepcopy(network.config, new)
        for module in network.modules():
            if id(vars(module).get("config")) in new:
                module.config = new[id(module.config)]
        models = [module for module in network.modules() if hasattr(module, "base_model_prefix")]
        for model in {network, *models}:
            if any(isinstance(part, ReplacedTransformersAttention) for part in model.modules()):
                model.register_forward_pre_hook(refuse_options, with_kwargs=True)
    setattr(network.config, REPLACED, [*getattr(network.config, REPLACED, []), dict(replaced)])


def refuse_options(module: Any, args: Any, options: Mapping[str, Any]) -> None:
    """Raises a `UserError` if a mask is given to a module or weights of attention are asked for, as its pre-hook."""
    mask = part_of(SimpleNamespace(**options), "attention_mask", "head_mask")
    if (mask is not None or options.get("is_causal")) and "input_ids" not in options:
        raise UserError(
            "a model whose attention linvit has replaced takes no attention_mask and no head_mask; pass images of one "
            "size without padding"
        )
    asked = options.get("output_attentions")
    if getattr(getattr(module, "config", None), "output_attentions", False) if asked is None else asked:
        raise UserError(
            "output_attentions needs softmax's weights, which this model's attention no longer forms. Leave it out; "
            "linvit.analysis.Recorder finds the matrix of any mechanism"
        )
