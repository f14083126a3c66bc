"""Trained models of timm and of Hugging Face's transformers by name, with the preparation of their images."""

from typing import Any, NamedTuple

import timm
from torch import nn

from linvit.backbones.create import create_backbone
from linvit.backbones.transformers.model import read_config, read_images
from linvit.io.terminal import reflow

NAMES = "timm:MODEL, or hf:FOLDER or hf:OWNER/MODEL of transformers"
IMAGES = ("img_size", "mean", "std", "crop_pct", "crop_mode")


class TrainedBackbone(NamedTuple):
    """A trained model of another library.

    Attributes:
        spec: The spec of the backbone, which loads its weights.
        images: Preparation of its images, as options of data modules; empty if unknown.
    """

    spec: dict[str, Any]
    images: dict[str, Any]

    def build(self, **options: Any) -> nn.Module:
        """Returns the backbone without its classifier."""
        return create_backbone(self.spec, num_classes=0, **options).eval()

    def print_images(self) -> None:
        """Prints `images` of a model of transformers, or that they are unknown; nothing for timm's."""
        name, images = self.spec["model"], ", ".join(f"{option} {value}" for option, value in self.images.items())
        unknown = f"'{name}' has no preprocessor_config.json: images are normalised by the mean and std of ImageNet. "
        unknown += "If the model was trained with others, add that file"
        if self.spec["name"] == "transformers":
            print(reflow(f"image preparation of '{name}': {images}" if images else unknown))


def trained_backbone(name: str) -> TrainedBackbone | None:
    """Returns the model of `timm:MODEL`, `hf:FOLDER` or `hf:OWNER/MODEL`; None of any other name.

    For a model of transformers, config and image processor are read now, and the spec has the config.

    Raises:
        UserError: If transformers is not installed, or has no config of this name.
    """
    library, _, model = name.partition(":")
    if library == "timm":
        known: Any = timm.get_pretrained_cfg(model)
        images = {} if known is None else {**known.to_dict(), "img_size": list(known.input_size[1:])}
        images = {key: list(value) if isinstance(value, tuple) else value for key, value in images.items()}
        spec = {"name": "timm", "model": model, "pretrained": True}
        return TrainedBackbone(spec, {key: images[key] for key in IMAGES if key in images})
    if library != "hf":
        return None
    spec = {"name": "transformers", "model": model, "config": read_config(model), "pretrained": True}
    return TrainedBackbone(spec, read_images(model))
