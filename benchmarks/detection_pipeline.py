"""Images per second and core of the training pipelines of COCO's recipes, against plain torchvision v2 pipelines.

Usage: python benchmarks/detection_pipeline.py FOLDER [--images 40] [--rounds 3] [--masks] [--multiscale]

FOLDER is COCO, or what benchmarks/coco_like.py makes. Both read, decode, resize to (1333, 800) or as DETR's recipe of
multi-scale training says, flip and normalise, with boxes and perhaps masks, one image after another in one thread; they
take turns, image by image, and the time of the processor is counted. Annotations are read beforehand by both: ours as
run-length encodings, theirs as `tv_tensors`, masks by the same decoder, in `torchvision.datasets`' manner.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from linvit.data import DetectionData
from linvit.data.base import IMAGENET_MEAN, IMAGENET_STD
from linvit.data.loading.sampler import SeededIndex, sample_seed
from linvit.data.sources.coco import rle_counts
from linvit.data.transforms.detection import DetectionAugmentation
from linvit.io import coco_masks

SIDES = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)


class CropOfAnySize(torch.nn.Module):
    """A crop of DETR's recipe."""

    def forward(self, *sample: Any) -> Any:
        """Crops image, boxes and masks alike."""
        height, width = (int(torch.randint(384, 601, ())) for _ in range(2))
        size = [min(side, full) for side, full in zip((height, width), sample[0].shape[-2:], strict=True)]
        return v2.RandomCrop(size)(*sample)


def torchvision_pipeline(multiscale: bool) -> v2.Compose:
    """What the recipe says, by torchvision's transforms."""
    resize = v2.RandomShortestSize(list(SIDES) if multiscale else [800], 1333, antialias=False)
    crop = v2.Compose([v2.RandomShortestSize([400, 500, 600], antialias=False), CropOfAnySize(), resize])
    return v2.Compose(
        [
            v2.RandomHorizontalFlip(),
            v2.RandomChoice([resize, crop]) if multiscale else resize,
            v2.SanitizeBoundingBoxes(labels_getter=lambda inputs: inputs[2:]),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )


def annotations(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The objects of each image that are no crowds, masks as run-length encodings."""
    content = json.loads(path.read_text(encoding="utf-8"))
    images = {image["id"]: image for image in content["images"]}
    found = defaultdict(list)
    for one in content["annotations"]:
        image = images[one["image_id"]]
        size = (image["height"], image["width"])
        if not one["iscrowd"]:
            rle = {"size": list(size), "counts": rle_counts(one["segmentation"], size)}
            found[image["file_name"]].append(one | {"rle": rle})
    return found


def torchvision_sample(file: Path, objects: list[dict[str, Any]], transform: v2.Compose, masks: bool) -> Any:
    """One training sample by torchvision's transforms."""
    image = tv_tensors.Image(decode_image(str(file), ImageReadMode.RGB))
    size = tuple(image.shape[-2:])
    given = torch.tensor([one["bbox"] for one in objects], dtype=torch.float32).view(-1, 4)
    boxes = v2.functional.convert_bounding_box_format(
        tv_tensors.BoundingBoxes(given, format="XYWH", canvas_size=size),  # type: ignore[call-overload]
        new_format=tv_tensors.BoundingBoxFormat.XYXY,
    )
    labels = torch.tensor([one["category_id"] for one in objects])
    if not masks:
        return transform(image, boxes, labels)
    decoded = torch.from_numpy(coco_masks.decode([one["rle"] for one in objects]))
    return transform(image, boxes, labels, tv_tensors.Mask(decoded))


def main(folder: Path, images: int, rounds: int, masks: bool, multiscale: bool) -> None:
    """Prints the images per second of both, and their ratio."""
    torch.set_num_threads(1)
    augmentation = DetectionAugmentation(0.5, SIDES, (400, 500, 600)) if multiscale else DetectionAugmentation()
    data = DetectionData(str(folder), masks=masks, resize_limits=(1333, 800), augmentation=augmentation)
    data.setup("fit")
    found = annotations(folder / "annotations" / "instances_train2017.json")
    names = [Path(data.splits["train"][int(row)]["image"].filename) for row in data.train_set.chosen]
    rows = [row for row, name in enumerate(names) if found[name.name]][:images]  # torchvision wants an object
    transform = torchvision_pipeline(multiscale)

    def ours(row: int, turn: int) -> None:
        sample = data.train_set[SeededIndex(row, sample_seed(0, turn, row))]
        data.finish(data.collate([sample]))

    def theirs(row: int, turn: int) -> None:
        torchvision_sample(names[row], found[names[row].name], transform, masks)

    spent = {"linvit": [0.0] * rounds, "torchvision": [0.0] * rounds}
    for turn in range(rounds + 1):  # the first warms up
        for row in rows:
            for name, run in (("linvit", ours), ("torchvision", theirs)):
                before = time.process_time()
                run(row, turn)
                if turn:
                    spent[name][turn - 1] += time.process_time() - before
    for name, seconds in spent.items():
        each = [len(rows) / turn for turn in seconds]
        print(f"{name:12} {median(each):6.1f} images/s and core, {min(each):.1f} to {max(each):.1f} in {rounds} rounds")
    ratios = [b / a for a, b in zip(spent["linvit"], spent["torchvision"], strict=True)]
    print(f"ratio        {median(ratios):6.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--multiscale", action="store_true")
    given = parser.parse_args()
    main(given.folder, given.images, given.rounds, given.masks, given.multiscale)
