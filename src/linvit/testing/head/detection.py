"""What a head of detection promises: losses that are connected and finite, detections inside the image, any size."""

import copy
from typing import Any

import torch
from torch import Tensor

from linvit.heads.detection.base import Detections
from linvit.testing.backbone.images import CLASSES
from linvit.testing.head.subject import Batch, DetectionSubject, target_of
from linvit.testing.numbers import normal
from linvit.testing.report import at, require
from linvit.testing.subject import Size, sized

SIZES = ((97, 131), (33, 64), (1, 1), (1, 70))
AUTOCAST = 0.1  # the largest relative difference that bfloat16 may make to the losses of one batch


def losses(subject: DetectionSubject) -> str:
    """Checks finite scalar losses of a batch of two sizes, of which one image has no box."""
    found = finite_losses(subject.build(), subject.inputs())
    return ", ".join(f"{name} {value.item():.3g}" for name, value in found.items())


def empty_targets(subject: DetectionSubject) -> str:
    """Checks that losses without any box, or with boxes without area, are finite and reach all that others reach."""
    model, given = subject.build(), subject.inputs()
    _backward(finite_losses(model, given))
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    flat = torch.tensor([[4.0, 4, 4, 9], [-9, 3, -2, 8]])
    for what, boxes in (("no boxes", flat[:0]), ("boxes without area", flat)):
        model.zero_grad()
        with at(what):
            _backward(finite_losses(model, Batch([target_of(x, boxes) for x in given.images], **given.named)))
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        lost = sorted(reached - grads.keys())
        require(not lost, f"{what}: no gradient for {', '.join(lost[:8])}, so DDP waits for it for ever")
        infinite = [name for name, grad in grads.items() if not grad.isfinite().all()]
        require(not infinite, f"{what}: gradient not finite: {', '.join(infinite[:8])}")
    return "finite, and a gradient for every parameter that has one with boxes"


@torch.no_grad()
def detections(subject: DetectionSubject) -> str:
    """Checks the form of detections: inside the image, the best first, classes in range, of the original size."""
    images = subject.inputs().images
    shapes = [(x.shape[-2], x.shape[-1]) for x in images]
    originals = [(3 * height + 1, 2 * width + 1) for height, width in shapes]
    counts = []
    for sizes, seed in ((None, 0), (originals, 1), (None, 2)):  # other parameters find other classes
        model = subject.build(seed=seed)
        for one, size in zip(model(images, sizes=sizes), sizes or shapes, strict=True):
            _check_detections(one, size, model.head.with_masks)
            counts.append(len(one["boxes"]))
    return f"{', '.join(map(str, counts))} in 6 images"


def any_size(subject: DetectionSubject) -> str:
    """Checks losses and detections of images whose sides no reduction divides, down to 1 pixel."""
    model = subject.build()
    for size in SIZES:
        image = normal(3, *size, seed=1)
        given = Batch([target_of(image, torch.tensor([[0.0, 0, size[1], size[0]]]))], image=image)
        with at(sized(size)), torch.no_grad():
            finite_losses(model, given, f", in an image of {sized(size)}")
            _check_detections(given(model.eval())[0], size, model.head.with_masks)
    return ", ".join(map(sized, SIZES))


def autocast(subject: DetectionSubject) -> str:
    """Checks that losses under autocast are float32 and near those without, and boxes are float32."""
    model = subject.build(dtype=torch.float32, finds=False)  # rounding would choose among as good proposals
    given = subject.inputs().map(Tensor.float)
    torch.manual_seed(5)
    plain = finite_losses(copy.deepcopy(model), given)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        lower = finite_losses(model, given)
        _backward(lower)
        found = given(model.eval())
    types = {name: value.dtype for name, value in lower.items()} | {"boxes": found[0]["boxes"].dtype}
    half = [name for name, dtype in types.items() if dtype != torch.float32]
    require(not half, f"not float32 under autocast: {', '.join(half)}")
    total, reference = (sum(value.item() for value in run.values()) for run in (lower, plain))
    note = f"losses {total:.4g} instead of {reference:.4g}"
    require(abs(total - reference) / max(abs(reference), 1e-9) <= AUTOCAST, note)
    return note


def finite_losses(model: Any, given: Batch, where: str = "") -> dict[str, Tensor]:
    """Returns the losses in training mode, which must be finite scalars, one at least."""
    found: dict[str, Tensor] = given(model.train())
    require(found, f"no losses{where}")
    wrong = [name for name, value in found.items() if value.ndim or not value.isfinite()]
    require(not wrong, f"not a finite scalar: {', '.join(wrong)}{where}")
    return found


def _backward(losses: dict[str, Tensor]) -> None:
    sum(losses.values(), torch.zeros(())).backward()


def _check_detections(found: Detections, size: Size, with_masks: bool) -> None:
    """Ends a clause where the detections in an image of a size are not what they must be."""
    where = f", in an image of {sized(size)}"
    boxes, scores, labels = (found[name] for name in ("boxes", "scores", "labels"))
    count, shapes = len(boxes), tuple(tuple(x.shape) for x in (boxes, scores, labels))
    said = "boxes {}, scores {}, labels {}".format(*shapes)
    require(shapes == ((count, 4), (count,), (count,)), f"{said}{where}")
    limit = boxes.new_tensor([size[1], size[0]] * 2)
    require(((boxes >= 0) & (boxes <= limit)).all(), f"boxes outside the image{where}")
    require((boxes[:, 2:] >= boxes[:, :2]).all(), f"boxes with x2 < x1 or y2 < y1{where}")
    falling = (scores.diff() <= 0).all() and ((scores >= 0) & (scores <= 1)).all()
    require(falling, f"scores that do not fall, or outside 0 to 1{where}")
    require(((labels >= 0) & (labels < CLASSES)).all(), f"labels outside 0 to {CLASSES - 1}{where}")
    if with_masks:
        kind, shape, want = found["masks"].dtype, tuple(found["masks"].shape), (count, *size)
        require(kind == torch.bool and shape == want, f"masks {shape} of {kind} instead of {want} of bool{where}")
