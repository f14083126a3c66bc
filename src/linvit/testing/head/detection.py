"""What a head of detection promises: losses that are connected and finite, detections inside the image, any size."""

import copy

import torch
from torch import Tensor

from linvit.heads.detection.base import DetectionHead
from linvit.testing.attention.inputs import normal
from linvit.testing.backbone.images import CLASSES, sized
from linvit.testing.head.detection_batch import (
    lively,
    losses_of,
    mistake_in,
    not_finite,
    target_of,
    two_images,
    two_targets,
)
from linvit.testing.head.network import CHANNELS, REDUCTIONS, HeadSubject, network
from linvit.testing.report import Finding, at, failed, not_supported, passed, refusable

SIZES = ((97, 131), (33, 64), (1, 1), (1, 70))
AUTOCAST = 0.1  # the largest relative difference that bfloat16 may make to the losses of one batch


def constructor(subject: HeadSubject) -> Finding:
    """Checks that the head can be built from `channels`, `reductions` and `num_classes`, and keeps them."""
    head = subject.create().head
    if not isinstance(head, DetectionHead):
        return failed(f"it builds a {type(head).__name__}, which is no linvit.DetectionHead")
    if head.num_classes != CLASSES:
        return failed(f"the attribute num_classes is {head.num_classes} after num_classes={CLASSES}")
    return passed(f"reductions {list(head.reductions)}, {'boxes and masks' if head.with_masks else 'boxes'}")


def losses(subject: HeadSubject) -> Finding:
    """Checks finite scalar losses of a batch of two sizes, of which one image has no box."""
    found = losses_of(subject.build(), two_images(subject), two_targets(subject))
    return not_finite(found) or passed(", ".join(f"{name} {value.item():.3g}" for name, value in found.items()))


def empty_targets(subject: HeadSubject) -> Finding:
    """Checks that losses without any box, or with boxes without area, are finite and reach all that others reach."""
    model, images = subject.build(), two_images(subject)
    losses_of(model, images, two_targets(subject), backward=True)
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    flat = torch.tensor([[4.0, 4, 4, 9], [-9, 3, -2, 8]])
    for what, boxes in (("no boxes", flat[:0]), ("boxes without area", flat)):
        model.zero_grad()
        with at(what):
            found = losses_of(model, images, [target_of(x, boxes) for x in images], backward=True)
        if infinite := not_finite(found):
            return infinite
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if lost := sorted(reached - grads.keys()):
            return failed(f"{what}: no gradient for {', '.join(lost[:8])}, so DDP waits for it for ever")
        if wild := [name for name, grad in grads.items() if not grad.isfinite().all()]:
            return failed(f"{what}: gradient not finite: {', '.join(wild[:8])}")
    return passed("finite, and a gradient for every parameter that has one with boxes")


@torch.no_grad()
def detections(subject: HeadSubject) -> Finding:
    """Checks the form of detections: inside the image, the best first, classes in range, of the original size."""
    images = two_images(subject)
    originals = [(3 * x.shape[-2] + 1, 2 * x.shape[-1] + 1) for x in images]
    counts = []
    for sizes, seed in ((None, 0), (originals, 1), (None, 2)):  # other parameters find other classes
        model = lively(subject, seed)
        found = model(images, sizes=sizes)
        given = originals if sizes else [(x.shape[-2], x.shape[-1]) for x in images]
        for one, size in zip(found, given, strict=True):
            if mistake := mistake_in(one, size, model.head.with_masks):
                return failed(f"{mistake}, in an image of {sized(size)}")
            counts.append(len(one["boxes"]))
    return passed(f"{', '.join(map(str, counts))} in 6 images")


def any_size(subject: HeadSubject) -> Finding:
    """Checks losses and detections of images whose sides no reduction divides, down to 1 pixel."""
    model = lively(subject)
    for size in SIZES:
        image = normal(3, *size, seed=1)
        box = torch.tensor([[0.0, 0, size[1], size[0]]])
        with at(sized(size)), torch.no_grad():
            found = losses_of(model, [image], [target_of(image, box)])
            mistake = mistake_in(model.eval()([image])[0], size, model.head.with_masks)
        if mistake or not_finite(found):
            return failed(f"{mistake or 'a loss is not finite'}, in an image of {sized(size)}")
    return passed(", ".join(map(sized, SIZES)))


@torch.no_grad()
@refusable
def other_pyramids(subject: HeadSubject) -> Finding:
    """Checks a pyramid of other widths and fewer maps: the head takes it, or refuses it by a `UserError`."""
    images = two_images(subject)
    for channels, reductions in (((8, 8, 8, 8), REDUCTIONS), (CHANNELS[:3], REDUCTIONS[:3])):
        with at(f"channels {channels}"):
            model = network(subject.head, channels=channels, reductions=reductions).double()
            if infinite := not_finite(losses_of(model, images, two_targets(subject))):
                return infinite
            model.eval()(images)
    return passed("other widths, fewer maps")


def gradients(subject: HeadSubject) -> Finding:
    """Checks that a finite gradient reaches every map and every parameter, and is not 0 for any map.

    Parameters may have one of 0: none of the boxes may be for a level of the pyramid.
    """
    model = subject.build().train()
    maps: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: maps.extend(inputs[0]))
    total = sum(losses_of(model, two_images(subject), two_targets(subject)).values(), torch.zeros(()))
    hook.remove()
    sources = {f"map {i}": feature for i, feature in enumerate(maps)}
    sources |= {name: parameter for name, parameter in model.head.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(total, list(sources.values()), allow_unused=True)
    for name, gradient in zip(sources, found, strict=True):
        if gradient is None or not gradient.isfinite().all():
            return failed(f"{name} has {'no gradient' if gradient is None else 'a gradient that is not finite'}")
        if name.startswith("map ") and not gradient.any():
            return failed(f"the gradient of {name} is 0")
    return passed(f"{len(maps)} maps and {len(sources) - len(maps)} parameters")


def determinism(subject: HeadSubject) -> Finding:
    """Checks that the same seed gives the same losses, and that detections need no seed."""
    model, images = lively(subject), two_images(subject)
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(losses_of(copy.deepcopy(model), images, two_targets(subject)))
    with torch.no_grad():
        model.eval()
        pairs = zip(model(images), model(images), strict=True)
        same = all(torch.equal(one[name], other[name]) for one, other in pairs for name in one)
    different = [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])]
    if different or not same:
        return failed(f"two runs of one seed differ: {', '.join(different) or 'detections'}")
    return passed("equal")


@torch.no_grad()
def copies(subject: HeadSubject) -> Finding:
    """Checks that a copy, and a new instance with the same state, give the same detections."""
    model, other, images = lively(subject), subject.create().double().eval(), two_images(subject)
    other.load_state_dict(model.state_dict())
    for what, another in (("a copy", copy.deepcopy(model)), ("a new instance", other)):
        pairs = zip(model(images), another(images), strict=True)
        if not all(torch.equal(one[name], two[name]) for one, two in pairs for name in one):
            return failed(f"{what} of the same state has other detections")
    return passed("equal")


def autocast(subject: HeadSubject) -> Finding:
    """Checks that losses under autocast are float32 and near those without, and boxes are float32."""
    model = subject.build(dtype=torch.float32)
    images, targets = [image.float() for image in two_images(subject)], two_targets(subject)
    torch.manual_seed(5)
    plain = losses_of(copy.deepcopy(model), images, targets)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        lower = losses_of(model, images, targets, backward=True)
        found = model.eval()(images)
    if infinite := not_finite(lower):
        return infinite
    types = {name: value.dtype for name, value in lower.items()} | {"boxes": found[0]["boxes"].dtype}
    if half := [name for name, dtype in types.items() if dtype != torch.float32]:
        return failed(f"not float32 under autocast: {', '.join(half)}")
    total, reference = (sum(value.item() for value in run.values()) for run in (lower, plain))
    error = abs(total - reference) / max(abs(reference), 1e-9)
    note = f"losses {total:.4g} instead of {reference:.4g}"
    return passed(note) if error <= AUTOCAST else failed(note)


def devices(subject: HeadSubject) -> Finding:
    """Checks losses and detections on a GPU, where there is one."""
    if not torch.cuda.is_available():
        return not_supported("no GPU here")
    model, images = subject.build(dtype=torch.float32).cuda(), [x.float().cuda() for x in two_images(subject)]
    targets = [{name: tensor.cuda() for name, tensor in target.items()} for target in two_targets(subject)]
    found = losses_of(model, images, targets, backward=True)
    model.eval()(images)
    return not_finite(found) or passed(torch.cuda.get_device_name())


def compiles(subject: HeadSubject) -> Finding:
    """Checks that the detector's `compile` changes no detection beyond rounding."""
    model, images = lively(subject), two_images(subject)
    with torch.no_grad():
        before = model(images)
        model.compile()
        after = model(images)
    for one, other in zip(before, after, strict=True):
        if one["boxes"].shape != other["boxes"].shape or not torch.allclose(one["scores"], other["scores"], atol=1e-6):
            return failed("compiled, it has other detections")
    return passed("the same detections")
