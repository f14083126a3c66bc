"""What a head of detection promises: losses that are connected and finite, detections inside the image, any size."""

import copy
from typing import Any

import torch
from torch import Tensor

from linvit.heads.detection.base import Detections
from linvit.testing.backbone.images import CLASSES
from linvit.testing.head.subject import CHANNELS, REDUCTIONS, Batch, DetectionSubject, target_of
from linvit.testing.numbers import normal
from linvit.testing.report import Line, at, failed, not_supported, passed, refusable
from linvit.testing.subject import Size, sized

SIZES = ((97, 131), (33, 64), (1, 1), (1, 70))
AUTOCAST = 0.1  # the largest relative difference that bfloat16 may make to the losses of one batch


def losses(subject: DetectionSubject) -> Line:
    """Checks finite scalar losses of a batch of two sizes, of which one image has no box."""
    found = _losses(subject.build(), subject.inputs())
    return _not_finite(found) or passed(", ".join(f"{name} {value.item():.3g}" for name, value in found.items()))


def empty_targets(subject: DetectionSubject) -> Line:
    """Checks that losses without any box, or with boxes without area, are finite and reach all that others reach."""
    model, given = subject.build(), subject.inputs()
    _losses(model, given, backward=True)
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    flat = torch.tensor([[4.0, 4, 4, 9], [-9, 3, -2, 8]])
    for what, boxes in (("no boxes", flat[:0]), ("boxes without area", flat)):
        model.zero_grad()
        with at(what):
            found = _losses(model, Batch([target_of(x, boxes) for x in given.images], **given.named), backward=True)
        if infinite := _not_finite(found):
            return infinite
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if lost := sorted(reached - grads.keys()):
            return failed(f"{what}: no gradient for {', '.join(lost[:8])}, so DDP waits for it for ever")
        if infinite_grads := [name for name, grad in grads.items() if not grad.isfinite().all()]:
            return failed(f"{what}: gradient not finite: {', '.join(infinite_grads[:8])}")
    return passed("finite, and a gradient for every parameter that has one with boxes")


@torch.no_grad()
def detections(subject: DetectionSubject) -> Line:
    """Checks the form of detections: inside the image, the best first, classes in range, of the original size."""
    images = subject.inputs().images
    shapes = [(x.shape[-2], x.shape[-1]) for x in images]
    originals = [(3 * height + 1, 2 * width + 1) for height, width in shapes]
    counts = []
    for sizes, seed in ((None, 0), (originals, 1), (None, 2)):  # other parameters find other classes
        model = subject.build(seed=seed)
        for one, size in zip(model(images, sizes=sizes), sizes or shapes, strict=True):
            if mistake := _mistake(one, size, model.head.with_masks):
                return failed(f"{mistake}, in an image of {sized(size)}")
            counts.append(len(one["boxes"]))
    return passed(f"{', '.join(map(str, counts))} in 6 images")


def any_size(subject: DetectionSubject) -> Line:
    """Checks losses and detections of images whose sides no reduction divides, down to 1 pixel."""
    model = subject.build()
    for size in SIZES:
        image = normal(3, *size, seed=1)
        given = Batch([target_of(image, torch.tensor([[0.0, 0, size[1], size[0]]]))], image=image)
        with at(sized(size)), torch.no_grad():
            found = _losses(model, given)
            mistake = _mistake(given(model.eval())[0], size, model.head.with_masks)
        if mistake or _not_finite(found):
            return failed(f"{mistake or 'a loss is not finite'}, in an image of {sized(size)}")
    return passed(", ".join(map(sized, SIZES)))


@torch.no_grad()
@refusable
def other_pyramids(subject: DetectionSubject) -> Line:
    """Checks a pyramid of other widths and fewer maps: the head takes it, or refuses it by a `UserError`."""
    given = subject.inputs()
    for channels, reductions in (((8, 8, 8, 8), REDUCTIONS), (CHANNELS[:3], REDUCTIONS[:3])):
        with at(f"channels {channels}"):
            model = subject.create(channels=channels, reductions=reductions).double()
            if infinite := _not_finite(_losses(model, given)):
                return infinite
            given(model.eval())
    return passed("other widths, fewer maps")


def autocast(subject: DetectionSubject) -> Line:
    """Checks that losses under autocast are float32 and near those without, and boxes are float32."""
    model = subject.build(dtype=torch.float32, finds=False)  # rounding would choose among as good proposals
    given = subject.inputs().map(Tensor.float)
    torch.manual_seed(5)
    plain = _losses(copy.deepcopy(model), given)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        lower = _losses(model, given, backward=True)
        found = given(model.eval())
    if infinite := _not_finite(lower):
        return infinite
    types = {name: value.dtype for name, value in lower.items()} | {"boxes": found[0]["boxes"].dtype}
    if half := [name for name, dtype in types.items() if dtype != torch.float32]:
        return failed(f"not float32 under autocast: {', '.join(half)}")
    total, reference = (sum(value.item() for value in run.values()) for run in (lower, plain))
    error = abs(total - reference) / max(abs(reference), 1e-9)
    note = f"losses {total:.4g} instead of {reference:.4g}"
    return passed(note) if error <= AUTOCAST else failed(note)


def devices(subject: DetectionSubject) -> Line:
    """Checks losses and detections on a GPU, where there is one."""
    if not torch.cuda.is_available():
        return not_supported("no GPU here")
    model, given = subject.build(dtype=torch.float32).cuda(), subject.inputs().map(lambda x: x.float().cuda())
    given.targets = [{name: tensor.cuda() for name, tensor in target.items()} for target in given.targets]
    found = _losses(model, given, backward=True)
    given(model.eval())
    return _not_finite(found) or passed(torch.cuda.get_device_name())


@torch.no_grad()
def compiles(subject: DetectionSubject) -> Line:
    """Checks that the detector's `compile` changes no detection beyond rounding."""
    model, images = subject.build(), subject.inputs().images
    before = model(images)
    model.compile()
    for one, other in zip(before, model(images), strict=True):
        if one["boxes"].shape != other["boxes"].shape or not torch.allclose(one["scores"], other["scores"], atol=1e-6):
            return failed("compiled, it has other detections")
    return passed("the same detections")


def _losses(model: Any, given: Batch, backward: bool = False) -> dict[str, Tensor]:
    """Returns the losses in training mode, after their backward pass if that is asked for."""
    found: dict[str, Tensor] = given(model.train())
    if backward:
        sum(found.values(), torch.zeros(())).backward()
    return found


def _not_finite(found: dict[str, Tensor]) -> Line | None:
    """Returns the failure if there are no losses, or some are not finite scalars."""
    wrong = [name for name, value in found.items() if value.ndim or not value.isfinite()]
    if found and not wrong:
        return None
    return failed(f"not a finite scalar: {', '.join(wrong)}" if wrong else "no losses")


def _mistake(found: Detections, size: Size, with_masks: bool) -> str:
    """Returns what is wrong with the detections in an image of a size; empty if nothing is."""
    boxes, scores, labels = (found[name] for name in ("boxes", "scores", "labels"))
    count = len(boxes)
    limit = boxes.new_tensor([size[1], size[0]] * 2)
    if tuple(boxes.shape) != (count, 4) or tuple(scores.shape) != (count,) or tuple(labels.shape) != (count,):
        return f"boxes {tuple(boxes.shape)}, scores {tuple(scores.shape)}, labels {tuple(labels.shape)}"
    if not ((boxes >= 0) & (boxes <= limit)).all():
        return "boxes outside the image"
    if not (boxes[:, 2:] >= boxes[:, :2]).all():
        return "boxes with x2 < x1 or y2 < y1"
    if not (scores.diff() <= 0).all() or not ((scores >= 0) & (scores <= 1)).all():
        return "scores that do not fall, or outside 0 to 1"
    if not ((labels >= 0) & (labels < CLASSES)).all():
        return f"labels outside 0 to {CLASSES - 1}"
    if with_masks and (found["masks"].dtype != torch.bool or tuple(found["masks"].shape) != (count, *size)):
        return f"masks {tuple(found['masks'].shape)} of {found['masks'].dtype} instead of {(count, *size)} of bool"
    return ""
