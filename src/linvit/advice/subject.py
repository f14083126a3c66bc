"""Networks that advice is asked for: built at any image size, as they are or with another attention."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import timm
from torch import nn

from linvit.advice.ceiling import Values
from linvit.backbones.create import create_backbone
from linvit.backbones.replace_attention import replace_attention
from linvit.backbones.timm.model import timm_backbone
from linvit.backbones.trained import trained_backbone
from linvit.errors import UserError
from linvit.registry import Spec, backbones
from linvit.weights.read import HUB

CEILING = "linvit.advice.ceiling:Values"
EXPORTED = (".onnx", ".pt2")


@dataclass
class Subject:
    """A network.

    Attributes:
        name: Name for sentences.
        own: Image size (H, W) for which it is made.
        build: Builds it for a size (H, W).
        code: Python that builds it for the side `{size}`.
        timm: Its name in timm, or "".
        teacher: Its name for `linvit linearize --teacher`, or "".
        multiple: Sides of images are multiples of this: the stride of its last features.
        images: Preparation of its images, as options of data modules.
        class_names: Of its classes; None if they are not known.
        weights: Builds it with trained weights; None if `build` does.
        several_sizes: True if it was trained on images of several sizes in one batch.
    """

    name: str
    own: tuple[int, int]
    build: Callable[[tuple[int, int]], nn.Module]
    code: str
    timm: str = ""
    teacher: str = ""
    in_chans: int = 3
    multiple: int = 32
    images: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    weights: Callable[[tuple[int, int]], nn.Module] | None = None
    several_sizes: bool = False

    def trained(self, size: tuple[int, int]) -> nn.Module:
        """Builds the network for a size with its trained weights; raises a `UserError` if there are none."""
        return (self.weights or self.build)(size)

    def with_attention(self, network: nn.Module, attention: Spec | Sequence[Any], size: tuple[int, int]) -> nn.Module:
        """Replaces the attention of a copy of a network, whose other weights both share."""
        shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
        made = copy.deepcopy(network, shared)
        replace_attention(backbone_of(made), attention, size)
        return made


def backbone_of(network: nn.Module) -> Any:
    """Returns the backbone within the network of a dense task; else the network."""
    return next((module.backbone for module in network.modules() if hasattr(module, "backbone")), network)


def find_subject(model: str | Path | nn.Module) -> Subject:
    """Returns the network of a name of timm or linvit, `hf:FOLDER`, a run or file of `linvit.load`, or a module.

    Raises:
        UserError: If the name does not exist, or the file is of another kind.
    """
    if isinstance(model, nn.Module):
        subject = _of_module(model, type(model).__name__, "model  # yours")
    elif Path(model).suffix in EXPORTED:
        raise UserError(f"'{model}' is an exported program, whose attention cannot be replaced; give the run instead")
    elif str(model).startswith("hf:") and (known := trained_backbone(str(model))) is not None:
        code = f"transformers.AutoModel.from_pretrained({known.spec['model']!r})"
        subject = _of_module(known.build(), str(model), code)
        subject.images = {name: value for name, value in known.images.items() if name != "img_size"}
        subject.own = tuple(known.images.get("img_size", subject.own))
        subject.teacher = str(model)
    elif Path(model).exists() or str(model).startswith(HUB):
        from linvit.inference.model import load  # imports what reads data

        trained = load(model)
        network = trained._task.measurable_network().eval()
        subject = _of_module(network, str(model), f"linvit.load({str(model)!r}).network")
        sizes = (trained.description.preprocessing or {}).get("size"), trained.description.options.get("img_size")
        size = next((each for each in sizes if each), subject.own)
        subject.own = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        subject.in_chans = int(trained.description.options.get("in_chans") or 3)
        subject.images = _images(trained.description.preprocessing or {})
        subject.several_sizes = "patch_size" in (trained.description.preprocessing or {})
        subject.class_names, subject.teacher = trained.class_names, str(model)
    else:
        subject = _of_name(str(model))
    network = subject.build(subject.own)
    levels: Any = getattr(backbone_of(network), "feature_info", None)
    subject.multiple = int(levels[-1]["reduction"]) if levels else 32
    return subject


def _of_name(name: str) -> Subject:
    architecture = name.partition(".")[0]
    ours = name in backbones.names() or ":" in name
    entry = timm.models.model_entrypoint(architecture) if timm.is_model(architecture) else None
    if ours and (entry is None or entry.__module__.startswith("linvit.")):
        network: Any = create_backbone(name)
        config = getattr(network, "pretrained_cfg", None) or {}
        own = tuple(config.get("input_size", (3, 224, 224))[1:])
        code = f"linvit.create_backbone({name!r}, img_size={{size}})"

        def untrained(size: tuple[int, int]) -> nn.Module:
            raise UserError(f"--data scores a trained network, and '{name}' is a name alone: give a run or a file")

        build = lambda size: create_backbone(name, img_size=list(size))  # noqa: E731
        return Subject(name, (own[0], own[1]), build, code, weights=untrained)
    if not timm.is_model(architecture) and ("/" in name or "." in name):
        raise UserError(f"'{name}' is neither a file or folder nor a model of timm or linvit")

    def make(size: tuple[int, int], pretrained: bool = False) -> nn.Module:
        return timm_backbone(name, img_size=list(size), pretrained=pretrained)

    if not timm.is_model(architecture):
        make((224, 224))  # says so, and which names are near
    known: Any = timm.get_pretrained_cfg(architecture)
    fixed = known is not None and known.fixed_input_size
    own = known.input_size[1:] if known is not None else (224, 224)
    code = f"timm.create_model({name!r}{', img_size={size}' * fixed}, pretrained=True)"
    weights = partial(make, pretrained=True)
    images = _images(known.to_dict() if known else {})
    return Subject(name, (own[0], own[1]), make, code, name, f"timm:{name}", images=images, weights=weights)


def _images(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the preparation of images in a configuration of timm or of a run, as options of data modules."""
    names = ("mean", "std", "crop_pct", "crop_mode", "bands", "value_range", "exif_orientation")
    return {name: config[name] for name in names if config.get(name) is not None}


def _of_module(network: nn.Module, name: str, code: str) -> Subject:
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None) or {}
    channels, *given = config.get("input_size", (3, 224, 224))
    own = getattr(getattr(backbone_of(network), "patch_embed", None), "img_size", None) or tuple(given)

    def build(size: tuple[int, int]) -> nn.Module:
        made = copy.deepcopy(network)
        inner = backbone_of(made)
        if hasattr(inner, "set_input_size") and tuple(size) != tuple(own):
            inner.set_input_size(img_size=size)
        return made

    return Subject(name, (own[0], own[1]), build, code, in_chans=channels, images=_images(config))


def without_cores(subject: Subject, network: nn.Module, size: tuple[int, int], project: str = "qkv") -> nn.Module:
    """Returns a copy of a network whose attention is replaced by `Values`; as it is where linvit cannot replace it."""
    try:
        return subject.with_attention(network, {"name": CEILING, "project": project}, size)
    except UserError:
        return copy.deepcopy(network)


def cores_of(network: nn.Module) -> list[Values]:
    """Returns the `Values` in a network."""
    return [module for module in network.modules() if isinstance(module, Values)]
