"""linvit: every linear attention, in every vision backbone, on every task, behind one contract.

`import linvit` is cheap: classes that need torch are imported when they are first touched.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from linvit import registry  # its `backbones` and `heads` have the names of folders, so they get none here
from linvit.errors import UserError as UserError
from linvit.registry import preset as preset

if TYPE_CHECKING:
    from linvit.attention.base import Attention as Attention
    from linvit.attention.base import Grid as Grid
    from linvit.attention.base import create_attention as create_attention
    from linvit.attention.ops.decorators import full_precision as full_precision
    from linvit.attention.ops.decorators import recomputed as recomputed
    from linvit.backbones.base import Backbone as Backbone
    from linvit.backbones.create import create_backbone as create_backbone
    from linvit.backbones.replace_attention import replace_attention as replace_attention
    from linvit.heads.create import create_head as create_head
    from linvit.heads.detection.base import DetectionHead as DetectionHead
    from linvit.heads.detection.detector import create_detector as create_detector
    from linvit.heads.segmentation.base import SegmentationHead as SegmentationHead
    from linvit.heads.segmentation.segmentor import create_segmentor as create_segmentor
    from linvit.inference.model import load as load
    from linvit.layers.attention_layer import AttentionLayer as AttentionLayer
    from linvit.linearization.distillation import Distillation as Distillation
    from linvit.linearization.distillation import Matching as Matching
    from linvit.linearization.student import linearize as linearize
    from linvit.weights.load import load_pretrained as load_pretrained

__version__ = version("linvit")

register_attention, list_attentions = registry.attentions.register, registry.attentions.names
register_backbone, list_backbones = registry.backbones.register, registry.backbones.names
register_head, list_heads = registry.heads.register, registry.heads.names

_LAZY = {
    "Attention": "linvit.attention.base",
    "AttentionLayer": "linvit.layers.attention_layer",
    "Backbone": "linvit.backbones.base",
    "DetectionHead": "linvit.heads.detection.base",
    "Distillation": "linvit.linearization.distillation",
    "Grid": "linvit.attention.base",
    "Matching": "linvit.linearization.distillation",
    "SegmentationHead": "linvit.heads.segmentation.base",
    "create_attention": "linvit.attention.base",
    "create_backbone": "linvit.backbones.create",
    "create_detector": "linvit.heads.detection.detector",
    "create_head": "linvit.heads.create",
    "create_segmentor": "linvit.heads.segmentation.segmentor",
    "full_precision": "linvit.attention.ops.decorators",
    "linearize": "linvit.linearization.student",
    "load": "linvit.inference.model",
    "load_pretrained": "linvit.weights.load",
    "recomputed": "linvit.attention.ops.decorators",
    "replace_attention": "linvit.backbones.replace_attention",
}

_REGISTRIES = ("attention", "backbone", "head")
__all__ = sorted(
    ["UserError", "preset", *_LAZY, *(name for kind in _REGISTRIES for name in (f"list_{kind}s", f"register_{kind}"))]
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'linvit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
