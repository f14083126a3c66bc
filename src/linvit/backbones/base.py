"""Base class of backbones: timm's contract, initial values, and parameters shared by several layers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linvit.attention.base import Grid, Packed
from linvit.backbones.initialise import classifier, init_vit, tie_mechanisms
from linvit.backbones.packing import as_batch
from linvit.backbones.stage import Stage
from linvit.errors import UserError, check_choice


class Backbone(nn.Module):
    """Base class of backbones, linvit's and third-party ones: timm's contract, with timm's names.

    A subclass defines a constructor that takes `in_chans`, `num_classes`, `img_size`, `drop_path_rate` and, optionally,
    `attention`. It calls this one, builds `stages`, and ends with `finalize`. Everything else has defaults:
    features, pruning, pooling and classifier, checkpointing, weight decay and layer groups.

    A stage maps a plane (B, C, H, W) to tokens (B, N, C'), prefix first, and their `Grid`;
    `linvit.backbones.stage.Stage` is such a stage and checkpoints its blocks. Other backbones than pyramids of stages
    override `levels`, the name of the modules whose outputs are features, and `forward_levels`, as DeiT does.

    Args:
        num_classes: Classes; 0 for features.
        num_features: Channels of the last feature.
        global_pool: Input of the classifier: "token" (the class token) or "avg" (the mean of the patch tokens).
        num_prefix_tokens: Class and register tokens before the patch tokens of the last feature.

    Args of the constructors of families:
        in_chans: Image channels.
        img_size: Side, or (H, W), of the images, for parameters of fixed length.
        attention: One spec, or a list with one per stage or per block.
        drop_path_rate: Stochastic depth of the last block, linear from 0 at the first.
        embed_dims: Channels C of each stage.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        mlp_ratio, mlp_ratios: Hidden width of the feed-forward layer over C.
        ffn: Feed-forward layer: "mlp", or "mbconv", EfficientViT's with a depthwise convolution and BatchNorm.
        qkv_bias: Bias in the q, k, v projections.
        proj_drop: Dropout after the output projection of each attention.
        qk_norm: Norm of queries and keys in each attention, "none", "rms" or "l2"; see `linvit.AttentionLayer`.
        feature_norms: Add a LayerNorm to the features of all stages but the last, which has the final norm (as in the
            reference for dense prediction). `forward_intermediates(norm=True)` applies them; the classifier does
            not use them.

    Attributes:
        feature_info: For each feature the name of its `module`, its channels `num_chs`, and its `reduction`, image
            side over feature side.
        feature_norms: Norms of all features but the last, in backbones for dense prediction that have them.
        norm: The final norm.
        head: The classifier.
        packs: True if `forward_levels` takes a list of images (in_chans, H, W) of several sizes, too, and returns a row
            (1, T, C) with a `Packed`.
        dense: Options of the constructor in the authors' models for dense tasks, where these differ.
            `linvit.create_segmentor` sets them.
    """

    levels: ClassVar[str] = "stages"
    packs: ClassVar[bool] = False
    dense: ClassVar[Mapping[str, Any]] = {}
    feature_info: list[dict[str, str | int]]
    feature_norms: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    in_chans: int | None = None

    def __init__(
        self, num_classes: int, num_features: int, global_pool: str = "avg", num_prefix_tokens: int = 0
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = num_features
        self.num_prefix_tokens = num_prefix_tokens
        self.check_pool(global_pool)
        self.global_pool = global_pool
        self.grad_checkpointing = False

    def finalize(
        self, norm: nn.Module, feature_info: list[dict[str, str | int]], initialise: nn.Module | None = None
    ) -> None:
        """Completes the construction: adds final norm and classifier, sets initial values, and ties mechanisms.

        A constructor whose `forward_head` changes the channels of the last feature sets `head_hidden_size` before.
        `pyramid_info` returns the `feature_info` of a pyramid. Only `initialise`, if it is given, gets a vision
        transformer's initial values.
        """
        self.norm = norm
        self.head = classifier(self.head_hidden_size, self.num_classes)
        self.feature_info = feature_info
        convolutions = (module.in_channels for module in self.modules() if isinstance(module, nn.Conv2d))
        self.in_chans = next(convolutions, None)  # of the stem, which comes first
        init_vit(self if initialise is None else initialise)
        tie_mechanisms(self)

    def init_attention(self, name: str, layer: nn.Module) -> None:
        """Initialises a new attention layer, which replaces the one of this name, as the constructor does."""
        init_vit(layer)

    def check_pool(self, global_pool: str) -> None:
        """Raises a `UserError` unless the pooling is known and, for "token", a class token exists."""
        check_choice("global_pool", global_pool, ["token", "avg"])
        if global_pool == "token" and not self.num_prefix_tokens:
            raise UserError("global_pool 'token' needs the class token; set class_token: true or global_pool: avg")

    def check_channels(self, images: Tensor) -> None:
        """Raises a `UserError` for images (B, C, H, W) with another number of channels than the backbone's."""
        given, own = images.shape[-3], self.in_chans
        if own is not None and given != own:
            way = ", as images.expand(-1, 3, -1, -1) does" if (given, own) == (1, 3) else ""
            raise UserError(
                f"got images of {given} channels, but {type(self).__name__} was built for {own}: build it with "
                f"in_chans={given}, or convert the images to {own} channels{way}"
            )

    def forward_levels(
        self, x: Tensor, take: Collection[int] = (), stop: int | None = None
    ) -> tuple[Tensor, Grid | Packed, list[tuple[Tensor, Grid]]]:
        """Runs images through the first `stop` levels; returns tokens and grid of the last, and of those in `take`."""
        self.check_channels(x)
        found = []
        for i, stage in enumerate(getattr(self, self.levels)[:stop]):
            tokens, grid = stage(x)
            x = grid.plane(tokens)  # (B, C, H, W)
            if i in take:
                found.append((tokens, grid))
        return tokens, grid, found

    def forward_features(self, x: Tensor) -> Tensor:
        """Returns the last, normalised tokens (B, N, C) of images (B, in_chans, H, W); `pack` is for a list."""
        check_batch("forward_features", x)
        return self.norm(self.forward_levels(x)[0])  # type: ignore[no-any-return]

    def pool(self, x: Tensor) -> Tensor:
        """Pools tokens (B, N, C) to one feature per image (B, C)."""
        return x[:, 0] if self.global_pool == "token" else x[:, self.num_prefix_tokens :].mean(1)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Returns logits (B, num_classes) of normalised tokens (B, N, C), or pooled features (B, C) if `pre_logits`."""
        x = self.pool(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor:
        """Returns logits (B, num_classes) of images (B, in_chans, H, W), or of a list of images (in_chans, H, W).

        Images of a list may be of any sizes. They are packed, without padding, and each gets the logits that it gets
        alone. Raises a `UserError` if the backbone is one that does not pack.
        """
        if not isinstance(x, Tensor):
            return self.forward_packed(x)  # type: ignore[no-any-return]
        return self.forward_head(self.forward_features(x))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward_packed(self, images: Sequence[Tensor]) -> Tensor:
        """Returns logits (B, num_classes) of a list of images; `torch.compile` leaves it as it is."""
        batch = as_batch(images)
        if batch is not None:
            return self(batch)  # type: ignore[no-any-return]
        x, grid = self.pack(images)
        return grid.restore(torch.cat([self.forward_head(part) for part in grid.split(x)]))

    def pack(self, images: Sequence[Tensor]) -> tuple[Tensor, Packed]:
        """Returns the last, normalised tokens of images (in_chans, H, W) of any sizes, a row (1, T, C)."""
        if not self.packs:
            name = type(self).__name__
            raise UserError(
                f"{name} takes images of one size, and got a list of several: its stages or windows need a batch of "
                f"one plane. Resize them to one size, or take a plain transformer, such as deit_small"
            )
        levels: Any = self.forward_levels  # which takes lists, too, where `packs` says so
        x, packed, _ = levels(images)
        return self.norm(x), packed

    def normalise(self, tokens: Tensor, level: int) -> Tensor:
        """Applies the norm of a level's feature, if any; for the last level this is the final norm."""
        norms = getattr(self, "feature_norms", ())
        if level < len(norms):
            return norms[level](tokens)  # type: ignore[no-any-return]
        return self.norm(tokens) if level == len(self.feature_info) - 1 else tokens

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Returns the features of chosen levels, like timm's method of this name, with the same options.

        `norm` applies the norms of the features; `output_fmt` is "NCHW" (B, C, H, W) or "NLC" (B, H W, C).
        """
        check_batch("forward_intermediates", x)
        check_choice("output_fmt", output_fmt, ["NCHW", "NLC"])
        take = sorted(set(feature_indices(len(getattr(self, self.levels)), indices)))
        last, _, found = self.forward_levels(x, take, max(take) + 1 if stop_early else None)
        features: list[Any] = []
        for level, (tokens, grid) in zip(take, found, strict=True):
            tokens = self.normalise(tokens, level) if norm else tokens
            feature = grid.plane(tokens) if output_fmt == "NCHW" else tokens[:, grid.num_prefix :]
            features.append((feature, tokens[:, : grid.num_prefix]) if return_prefix_tokens else feature)
        return features if intermediates_only else (self.norm(last), features)

    def prune_intermediate_layers(
        self, indices: int | list[int] | None = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the modules that are not needed for features at `indices`; returns the indices of these features."""
        levels = getattr(self, self.levels)
        take = feature_indices(len(levels), indices)
        del levels[max(take) + 1 :]
        if hasattr(self, "feature_norms"):
            kept = self.feature_norms[: 0 if prune_norm else max(take) + 1]
            self.feature_norms = nn.ModuleList(norm if i in take else nn.Identity() for i, norm in enumerate(kept))
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0)
        return take

    def get_classifier(self) -> Any:
        """Returns the classifier, or a tuple of several."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier by a new one; with 0 classes the model returns features. None keeps the pooling."""
        if global_pool is not None:
            self.check_pool(global_pool)
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = classifier(self.head_hidden_size, num_classes)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switches gradient checkpointing on or off: it saves memory and computes activations of blocks twice."""
        self.grad_checkpointing = enable
        for module in self.modules():
            if isinstance(module, Stage):
                module.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Returns names of parameters without weight decay: the tables of relative positions."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_position_bias_table")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Returns timm's layer groups for layer-wise learning rates: one per block, or one per stage if `coarse`."""
        stage = r"^stages\.(\d+)"
        return {
            "stem": r"^stages\.0\.(?:embed|pos_embed|cls_token)",
            "blocks": stage
            if coarse
            else [
                (stage + r"\.(?:embed|pos_embed|cls_token)", (0,)),
                (stage + r"\.blocks\.(\d+)", None),
                (stage + r"\.norm", (99999,)),
                (r"^(?:feature_norms|norm)", (99999,)),
            ],
        }


def check_batch(method: str, x: Any) -> None:
    """Raises a `UserError` for a list of images."""
    if not isinstance(x, Tensor):
        raise UserError(
            f"{method} takes a batch (B, C, H, W). Call pack(images) for the tokens of a list of images and where each "
            f"begins, or the backbone for their logits"
        )


def check_stages(count: int, **options: Sequence[Any]) -> None:
    """Raises a `UserError` unless each option has `count` values, one per stage."""
    for name, values in options.items():
        if len(values) != count:
            raise UserError(f"{name} must list {count} values, one per stage; got {list(values)}")


def feature_indices(count: int, indices: int | Sequence[int] | None) -> list[int]:
    """Returns the features that timm's `indices` select of `count`: None all, n the last n, a list the listed ones."""
    if indices is None:
        return list(range(count))
    if isinstance(indices, int):
        indices = range(-indices, 0)
    if not indices or not all(-count <= index < count for index in indices):
        raise UserError(
            f"feature indices {list(indices)} do not fit {count} features; allowed: {-count} to {count - 1}"
        )
    return [index % count for index in indices]
