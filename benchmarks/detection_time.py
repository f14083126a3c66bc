"""Time per image of linvit's Mask R-CNN against torchvision's: the same ResNet-50, weights, images and thresholds.

Both are built for 80 classes, and torchvision's random weights are loaded into ours; those of its classifier are larger
than usual, so that there are 100 detections with masks per image. torchvision's own resizing is set to leave the images
as they are. Both take the same number of proposals, 1000 of 1000 candidates of a level (2000 in training), and RoIs.
What differs is what the networks compute: the samples of a RoI's features are two by two per bin in torchvision and one
per pixel in ours (mmdetection's rule), and torchvision pastes masks by whole pixels.
The two run in turn in one process, and what is measured is the time of the processor, on which other processes have
little influence.

Example:
    $ python benchmarks/detection_time.py --size 320 416 --images 2 --rounds 5
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection import maskrcnn_resnet50_fpn

import linvit

CLASSES = 80


def torchvisions(size: tuple[int, int]) -> Any:
    """A Mask R-CNN of torchvision, without resizing, which finds something with random weights."""
    torch.manual_seed(0)
    model = maskrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=CLASSES + 1,
        min_size=min(size),
        max_size=max(size),
        rpn_post_nms_top_n_train=1000,
    )
    torch.nn.init.normal_(model.roi_heads.box_predictor.cls_score.weight, std=1.0)
    return model


def batch(size: tuple[int, int], images: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images, and ten boxes with masks in each."""
    torch.manual_seed(1)
    targets = []
    for _ in range(images):
        corner = torch.rand(10, 2) * torch.tensor([size[1], size[0]]) * 0.6
        boxes = torch.cat([corner, corner + 20 + torch.rand(10, 2) * 0.3 * min(size)], 1)
        masks = torch.zeros(10, *size, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        targets.append({"boxes": boxes, "labels": torch.randint(0, CLASSES, (10,)), "masks": masks})
    return [torch.rand(3, *size) for _ in range(images)], targets


def step(model: Any, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Callable[[], None]:
    """Forward and backward pass."""

    def run() -> None:
        model.train()
        model.zero_grad()
        sum(model(images, targets).values()).backward()

    return run


def inference(model: Any, images: list[Tensor]) -> Callable[[], None]:
    """Detections of a batch."""

    @torch.no_grad()
    def run() -> None:
        found = model.eval()(images)
        assert all(len(one["boxes"]) > 50 for one in found), [len(one["boxes"]) for one in found]

    return run


def main() -> None:
    """Prints a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=2, default=[320, 416], help="height and width")
    parser.add_argument("--images", type=int, default=2, help="per batch")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = (args.size[0], args.size[1])
    theirs = torchvisions(size)
    ours = linvit.create_detector({"name": "timm", "model": "resnet50"}, "mask_rcnn", CLASSES)
    linvit.load_pretrained(ours, theirs.state_dict())
    images, targets = batch(size, args.images)
    shifted = [{**target, "labels": target["labels"] + 1} for target in targets]
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    normalised = [(image - mean) / std for image in images]
    for what, pair in {
        "inference": (inference(ours, normalised), inference(theirs, images)),
        "training step": (step(ours, normalised, targets), step(theirs, images, shifted)),
    }.items():
        seconds: dict[str, list[float]] = {"linvit": [], "torchvision": []}
        for i in range(args.rounds + 1):
            turn = list(zip(seconds, pair, strict=True))
            for name, run in turn if i % 2 else turn[::-1]:
                start = time.process_time()
                run()
                seconds[name] += [(time.process_time() - start) / len(images)] if i else []
        least, others = (min(times) for times in seconds.values())
        ratios = [one / other for one, other in zip(*seconds.values(), strict=True)]
        medians = ", ".join(f"{name} {statistics.median(times):.3f} s" for name, times in seconds.items())
        print(
            f"{what} of {args.images} images {size[0]} x {size[1]}, per image: {medians}; ratio "
            f"{statistics.median(ratios):.2f} (of {args.rounds} rounds: {min(ratios):.2f} to {max(ratios):.2f}), "
            f"of the least times {least / others:.2f}"
        )


if __name__ == "__main__":
    main()
