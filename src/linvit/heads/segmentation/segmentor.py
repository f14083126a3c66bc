"""The network of semantic segmentation: a backbone, a head, and resizing to the image."""

from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor, nn

from linvit.backbones.create import create_backbone, dense_options
from linvit.errors import UserError
from linvit.heads.pyramid import drop_unused, feature_maps, pyramid
from linvit.heads.segmentation.base import SegmentationHead
from linvit.heads.segmentation.layers import resize
from linvit.registry import Spec, backbones, heads
from linvit.signatures import takes


class Segmentor(nn.Module):
    """A backbone and a head of semantic segmentation: images (B, 3, H, W) of any size to logits (B, K, H, W).

    Args:
        backbone: Any backbone with feature maps, of linvit or timm.
        head: A head that was made for the maps of the backbone that it wants; see `linvit.heads.pyramid.pyramid`.

    Raises:
        UserError: If the head was made for other maps.
    """

    def __init__(self, backbone: nn.Module, head: SegmentationHead) -> None:
        super().__init__()
        self.pyramid = pyramid(backbone, head.levels)
        made_for = head.channels, head.reductions
        if made_for != self.pyramid[1:]:
            raise UserError(
                f"{type(head).__name__} was made for channels and reductions {made_for}, but {type(backbone).__name__} "
                f"gives it {self.pyramid[1:]}. Make both by linvit.create_segmentor"
            )
        self.backbone = backbone
        self.head = head
        self.num_classes = head.num_classes

    @overload
    def forward(self, images: Tensor, *, auxiliary: Literal[False] = False, full_size: bool = True) -> Tensor: ...
    @overload
    def forward(
        self, images: Tensor, *, auxiliary: Literal[True], full_size: bool = True
    ) -> tuple[Tensor, list[Tensor]]: ...
    def forward(
        self, images: Tensor, *, auxiliary: bool = False, full_size: bool = True
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Returns logits (B, K, H, W) of images (B, 3, H, W).

        Args:
            images: Normalised images of any size, odd sides too.
            auxiliary: Return a pair of the logits and a list of the head's auxiliary logits, for the loss of training.
            full_size: Resize logits to the size of the images (bilinear). Otherwise they are as the head makes them,
                at a quarter of each side for most heads: with many classes, large images are too large for memory.
        """
        features = feature_maps(self.backbone, images, self.pyramid.indices)
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
) -> Segmentor:
    """Creates a network of semantic segmentation.

    A backbone takes the form that its authors publish for dense prediction (`Backbone.dense`: Swin has a norm on
    each feature, PVT no class token), unless its spec says otherwise. `linvit.load_pretrained` loads the weights of a
    whole network into it, or those of a classifier into its backbone.

    Args:
        backbone: Name, or `{name: ..., option: value}`.
        head: Name, or `{name: ..., option: value}`.
        num_classes: Classes K.
        attention: The attention of the backbone: one spec, or a list with one per stage or block; None is its own. The
            spec of the head `maresunet` has an attention of its own.
        img_size: Side, or (H, W), that tables of fixed length are built for; images may be of any other size. Where the
            spec of the backbone has an `img_size`, that is the backbone's.
        drop_path_rate: Stochastic depth of the backbone's last block.

    Raises:
        UserError: If a name or option is unknown, or the backbone has no feature maps that the head can use.

    Example:
        >>> model = linvit.create_segmentor(backbone="flatten_swin_tiny", head="upernet", num_classes=150, img_size=512)
        >>> model.eval()(torch.randn(1, 3, 97, 131)).shape
        torch.Size([1, 150, 97, 131])
    """
    head_name, _ = heads.parse(head)
    head_class: Any = heads.get(head_name)
    name, options = backbones.parse(backbone)
    spec = {"name": name, **dense_options(name), **options}
    shared = {"img_size": img_size, "drop_path_rate": drop_path_rate}
    context = {key: value for key, value in shared.items() if key not in options}
    network = create_backbone(spec, attention, num_classes=0, **context)
    indices, channels, reductions = pyramid(network, head_class.levels)
    drop_unused(network, indices)
    size = {"img_size": img_size} if takes(head_class, "img_size") else {}
    made = heads.create(head, channels=channels, reductions=reductions, num_classes=num_classes, **size)
    return Segmentor(network, made)
