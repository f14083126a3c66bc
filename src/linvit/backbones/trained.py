"""Trained models of timm and of Hugging Face's transformers by a name, with how they take images."""

from typing import Any, NamedTuple

import timm
from torch import nn

from linvit.backbones.create import create_backbone
from linvit.backbones.transformers.model import read_config, read_images

NAMES = "timm:MODEL, or hf:FOLDER or hf:OWNER/MODEL of transformers"
IMAGES = ("img_size", "mean", "std", "crop_pct", "crop_mode")


class TrainedBackbone(NamedTuple):
    """A trained model of another library.

    Attributes:
        spec: The spec of the backbone, which loads its weights.
        images: How it takes images, as options of data modules; empty if that is not known.
        about: Where `images` come from, as a sentence.
    """

    spec: dict[str, Any]
    images: dict[str, Any]
    about: str

    def build(self, **options: Any) -> nn.Module:
        """Returns the backbone without its classifier."""
        return create_backbone(self.spec, num_classes=0, **options).eval()


def trained_backbone(name: str) -> TrainedBackbone | None:
    """Returns the model of `timm:MODEL`, `hf:FOLDER` or `hf:OWNER/MODEL`; None of any other name.

    Of transformers, config and image processor are read at once, and the spec holds the config.

    Raises:
        UserError: If transformers is not installed, or has no config of this name.
    """
    library, _, model = name.partition(":")
    if library == "timm":
        known: Any = timm.get_pretrained_cfg(model)
        images = {} if known is None else {**known.to_dict(), "img_size": list(known.input_size[1:])}
        images = {key: list(value) if isinstance(value, tuple) else value for key, value in images.items()}
        spec = {"name": "timm", "model": model, "pretrained": True}
        return TrainedBackbone(spec, {key: images[key] for key in IMAGES if key in images}, "")
    if library != "hf":
        return None
    config = read_config(model)
    images = read_images(model)
    said = ", ".join(f"{key} {images[key]}" for key in IMAGES if key in images)
    about = (
        f"'{model}' says how it takes images: {said}"
        if images
        else (
            f"'{model}' has no preprocessor_config.json: images are normalised by the mean and std of ImageNet. If the "
            f"model was trained otherwise, set --data.mean and --data.std"
        )
    )
    spec = {"name": "transformers", "model": model, "config": config, "pretrained": True}
    return TrainedBackbone(spec, images, about)
