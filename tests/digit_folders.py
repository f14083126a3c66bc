"""Folders of digits with some of the ten classes, and what a network gets right in them, counted by hand."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

import linvit
from linvit.data import ClassificationData
from tests.data.images import save


def digit_folder(folder, names, count=8):
    """The first test digits of each of some classes: `folder/NAME/ROW.png`."""
    digits = ClassificationData("digits", num_workers=0, img_size=32)
    labels = np.array(digits.splits["test"]["label"])
    for name in names:
        for row in np.flatnonzero(labels == int(name))[:count].tolist():
            save(digits.splits["test"][row]["image"], Path(folder) / name / f"{row}.png")
    return folder


def count(run, folder, names):
    """Of the images of a folder, how many the run's network gets right when it may choose among some classes alone."""
    model = linvit.load(run.folder)
    right = 0
    for path in sorted(Path(folder).rglob("*.png")):
        with torch.no_grad():
            logits = model.network(model.transform(Image.open(path))[None])[0]
        right += max(names, key=lambda name: float(logits[int(name)])) == path.parent.name
    return right
