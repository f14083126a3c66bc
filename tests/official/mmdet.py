"""Names and shapes of the necks and heads of detectors in mmdetection's state dicts, as section 5 of its documents."""

from collections.abc import Sequence

from tests.official import conv, linear, norm

Shapes = dict[str, tuple[int, ...]]


def fpn(channels: Sequence[int], width: int, extra: bool = False) -> Shapes:
    """The neck, with the two more levels of RetinaNet or without."""
    shapes: Shapes = {}
    for i, into in enumerate(channels):
        shapes |= conv(f"neck.lateral_convs.{i}.conv", width, into, 1, 1)
        shapes |= conv(f"neck.fpn_convs.{i}.conv", width, width, 3, 3)
    for i, into in enumerate((channels[-1], width) if extra else ()):
        shapes |= conv(f"neck.fpn_convs.{len(channels) + i}.conv", width, into, 3, 3)
    return shapes


def retinanet(channels: Sequence[int], classes: int, width: int) -> Shapes:
    """Neck and head, on C3 to C5."""
    shapes = fpn(channels, width, extra=True)
    for i in range(4):
        for kind in ("cls", "reg"):
            shapes |= conv(f"bbox_head.{kind}_convs.{i}.conv", width, width, 3, 3)
    shapes |= conv("bbox_head.retina_cls", 9 * classes, width, 3, 3)
    return shapes | conv("bbox_head.retina_reg", 36, width, 3, 3)


def mask_rcnn(channels: Sequence[int], classes: int, width: int, fc_width: int, stages: int = 1) -> Shapes:
    """Neck, RPN and RoI heads; with several stages the cascade's."""
    shapes = fpn(channels, width) | conv("rpn_head.rpn_conv", width, width, 3, 3)
    shapes |= conv("rpn_head.rpn_cls", 3, width, 1, 1) | conv("rpn_head.rpn_reg", 12, width, 1, 1)
    for stage in range(stages):
        end = f".{stage}" if stages > 1 else ""
        box, mask = (f"roi_head.{kind}_head{end}" for kind in ("bbox", "mask"))
        for i in range(4 if stages > 1 else 0):
            name = f"{box}.shared_convs.{i}"
            shapes |= {f"{name}.conv.weight": (width, width, 3, 3)} | norm(f"{name}.bn", width)
            shapes |= {f"{name}.bn.running_mean": (width,), f"{name}.bn.running_var": (width,)}
        shapes |= linear(f"{box}.shared_fcs.0", fc_width, 49 * width)
        shapes |= {} if stages > 1 else linear(f"{box}.shared_fcs.1", fc_width, fc_width)
        shapes |= linear(f"{box}.fc_cls", classes + 1, fc_width) | linear(f"{box}.fc_reg", 4 * classes, fc_width)
        for i in range(4):
            shapes |= conv(f"{mask}.convs.{i}.conv", width, width, 3, 3)
        shapes |= conv(f"{mask}.upsample", width, width, 2, 2) | conv(f"{mask}.conv_logits", classes, width, 1, 1)
    return shapes
