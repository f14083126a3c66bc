"""Network of semantic segmentation: a backbone, a head, and resizing to the image."""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from linvit.heads.create import DenseNetwork, backbone_and_head
from linvit.heads.layers import resize
from linvit.registry import Spec


class Segmentor(DenseNetwork):
    """Backbone and head of semantic segmentation: maps images (B, 3, H, W) of any size to logits (B, K, H, W)."""

    @overload
    def forward(self, images: Tensor, *, auxiliary: Literal[False] = False, full_size: bool = True) -> Tensor: ...
    @overload
    def forward(
        self, images: Tensor, *, auxiliary: Literal[True], full_size: bool = True
    ) -> tuple[Tensor, list[Tensor]]: ...
    def forward(
        self, images: Tensor, *, auxiliary: bool = False, full_size: bool = True
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Returns logits (B, K, H, W) of normalised images (B, 3, H, W) of any size, including odd sides.

        With `auxiliary` the result also has a list of the head's auxiliary logits, for the loss of training. Without
        `full_size` logits have the head's size, mostly a quarter of each side, which saves memory.
        """
        features = self.feature_maps(images)
        if auxiliary:
            logits, others = self.head.with_auxiliary(features)
        else:
            logits, others = self.head(features), []
        if full_size:
            logits, *others = (resize(maps, images.shape[-2:]) for maps in (logits, *others))
        return (logits, others) if auxiliary else logits


def create_segmentor(
    backbone: Spec,
    head: Spec,
    num_classes: int,
    attention: Spec | Sequence[Spec] | None = None,
    img_size: int | Sequence[int] = 224,
    drop_path_rate: float = 0.0,
    in_chans: int = 3,
) -> Segmentor:
    """Creates a network of semantic segmentation.

    A backbone has the form that its authors publish for dense prediction (`Backbone.dense`: Swin has a norm on
    each feature, PVT no class token), unless its spec says otherwise. `linvit.load_pretrained` loads the weights of a
    whole network into it, or those of a classifier into its backbone.

    Args:
        backbone: Name, or `{name: ..., option: value}`.
        head: Name, or `{name: ..., option: value}`.
        num_classes: Classes K.
        attention: Attention of the backbone: one spec, or a list with one per stage or block; None is its default. The
            attention of the head `maresunet` is an option of the head.
        img_size: Side, or (H, W), for tables of fixed length; images may be of any other size. An
            `img_size` in the spec of the backbone has precedence.
        drop_path_rate: Stochastic depth of the backbone's last block.
        in_chans: Channels of the images.

    Raises:
        UserError: If a name or option is unknown, or the backbone has no feature maps that the head can use.

    Example:
        >>> model = linvit.create_segmentor(backbone="flatten_swin_tiny", head="upernet", num_classes=150, img_size=512)
        >>> model.eval()(torch.randn(1, 3, 97, 131)).shape
        torch.Size([1, 150, 97, 131])
    """
    return Segmentor(
        *backbone_and_head("segmentation", backbone, head, num_classes, attention, img_size, drop_path_rate, in_chans)
    )
