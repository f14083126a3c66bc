"""linvit: every linear attention, in every vision backbone, on every task, behind one contract.

`import linvit` is cheap: classes that need torch are imported on first use.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from linvit import registry  # its `backbones` and `heads` share names with subpackages, so they are not imported here
from linvit.errors import UserError as UserError
from linvit.registry import preset as preset
from linvit.registry.source import deferred

if TYPE_CHECKING:
    from linvit.advice.advise import advise as advise
    from linvit.attention.base import Attention as Attention
    from linvit.attention.base import Grid as Grid
    from linvit.attention.base import Packed as Packed
    from linvit.attention.base import create_attention as create_attention
    from linvit.attention.declarations import Facts as Facts
    from linvit.attention.declarations import Host as Host
    from linvit.attention.ops.decorators import full_precision as full_precision
    from linvit.attention.ops.decorators import recomputed as recomputed
    from linvit.backbones.base import Backbone as Backbone
    from linvit.backbones.create import create_backbone as create_backbone
    from linvit.backbones.images import forward_images as forward_images
    from linvit.backbones.replace_attention import replace_attention as replace_attention
    from linvit.experiments.hybrids.search import search_hybrid as search_hybrid
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
    from linvit.runs.options import read_config as read_config
    from linvit.runs.options import replace_options as replace_options
    from linvit.runs.run import Run as Run
    from linvit.runs.run import fit as fit
    from linvit.weights.load import load_pretrained as load_pretrained
    from linvit.weights.transformers import load_transformers as load_transformers

__version__ = version("linvit")

register_attention, list_attentions = registry.attentions.register, registry.attentions.names
register_attention_kernel = registry.attention_kernels.register
register_backbone, list_backbones = registry.backbones.register, registry.backbones.names
register_head, list_heads = registry.heads.register, registry.heads.names

__getattr__, _deferred = deferred(__name__, __file__)
_REGISTRIES = ("attention", "backbone", "head")
__all__ = sorted(
    [
        "UserError",
        "preset",
        "register_attention_kernel",
        *_deferred,
        *(name for kind in _REGISTRIES for name in (f"list_{kind}s", f"register_{kind}")),
    ]
)


def __dir__() -> list[str]:
    return sorted([*globals(), *_deferred])
