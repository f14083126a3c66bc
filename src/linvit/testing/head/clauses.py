"""What a head of semantic segmentation promises: shapes, sizes, auxiliary outputs, classifiers, gradients."""

import torch
from torch import Tensor

from linvit.heads.detection.base import DetectionHead
from linvit.heads.segmentation.base import SegmentationHead
from linvit.testing.attention.inputs import EXACT, normal, relative_error
from linvit.testing.backbone.images import CLASSES, sized
from linvit.testing.head.network import CHANNELS, REDUCTIONS, HeadSubject, network
from linvit.testing.report import Finding, at, failed, passed, refusable

SIZES = ((97, 131), (33, 64), (64, 192))
TRIES = 8


def constructor(subject: HeadSubject) -> Finding:
    """Checks that the head can be built from `channels`, `reductions` and `num_classes`, and keeps them."""
    head = subject.create().head
    if not isinstance(head, SegmentationHead):
        hint = "; its kind is 'detection_head'" if isinstance(head, DetectionHead) else ""
        return failed(f"it builds a {type(head).__name__}, which is no linvit.SegmentationHead{hint}")
    if head.num_classes != CLASSES:
        return failed(f"the attribute num_classes is {head.num_classes} after num_classes={CLASSES}")
    return passed(f"reductions {list(head.reductions)}, logits at 1/{head.reduction}")


@torch.no_grad()
def shapes(subject: HeadSubject) -> Finding:
    """Checks logits (B, K, H / reduction, W / reduction), also of maps that are wider than high."""
    head = subject.model.head
    for size in (subject.size, subject.wide):
        with at(sized(size)):
            got = tuple(head(subject.maps(size)).shape)
        want = (2, CLASSES, *(-(-side // head.reduction) for side in size))
        if got != want:
            return failed(f"logits {got} instead of {want} at {sized(size)}, by the head's reduction {head.reduction}")
    return passed(f"logits {want} at {sized(size)}")


@torch.no_grad()
def any_size(subject: HeadSubject) -> Finding:
    """Checks finite logits of images whose sides no reduction divides."""
    for size in SIZES:
        with at(sized(size)):
            out = subject.model.head(subject.maps(size))
        if tuple(out.shape[:2]) != (2, CLASSES) or not out.isfinite().all():
            return failed(f"{tuple(out.shape)}, {int((~out.isfinite()).sum())} not finite, at {sized(size)}")
    return passed(", ".join(map(sized, SIZES)))


@torch.no_grad()
@refusable
def other_pyramids(subject: HeadSubject) -> Finding:
    """Checks a pyramid of other widths and fewer maps: the head takes it, or refuses it by a `UserError`."""
    for channels, reductions in (((8, 8, 8, 8), REDUCTIONS), (CHANNELS[:3], REDUCTIONS[:3])):
        with at(f"channels {channels}"):
            model = network(subject.head, channels=channels, reductions=reductions).double().eval()
            out = model(subject.given)
        if tuple(out.shape) != (2, CLASSES, *subject.size):
            return failed(f"channels {channels} give {tuple(out.shape)}")
    return passed("other widths, fewer maps")


@torch.no_grad()
def auxiliary(subject: HeadSubject) -> Finding:
    """Checks that `with_auxiliary` returns the same logits, and auxiliary ones of as many classes."""
    head, maps = subject.model.head, subject.maps()
    logits, others = head.with_auxiliary(maps)
    if not relative_error(logits, head(maps)) <= EXACT:
        return failed("its logits are others than forward's")
    wrong = [tuple(other.shape) for other in others if tuple(other.shape[:2]) != (2, CLASSES) or other.ndim != 4]
    if wrong:
        return failed(f"auxiliary logits {wrong} instead of {(2, CLASSES, 'h', 'w')}")
    return passed(", ".join(f"{tuple(other.shape)}" for other in others) or "none")


@torch.no_grad()
def classifiers(subject: HeadSubject) -> Finding:
    """Checks that another number of classes changes the layers that `classifiers` names, and no others."""
    shapes = {name: t.shape for name, t in subject.model.state_dict().items()}
    other = subject.create(num_classes=CLASSES + 2)
    changed = {name for name, tensor in other.state_dict().items() if tensor.shape != shapes.get(name)}
    named = {module: f"{name}." for name, module in other.named_modules()}
    announced = tuple(named[module] for module in other.head.classifiers())
    missing = [name for name in changed if not name.startswith(announced)]
    same = [prefix for prefix in announced if not any(name.startswith(prefix) for name in changed)]
    if missing or same:
        return failed(f"layers of another shape that it does not name: {missing}; named, of the same shape: {same}")
    return passed(", ".join(prefix.removeprefix("head.").rstrip(".") for prefix in announced))


def gradients(subject: HeadSubject) -> Finding:
    """Checks that a finite gradient reaches every map and every parameter, and is not 0 in evaluation.

    A few ReLUs may all be off, so what is 0 is tried with other parameters before it counts.
    """
    lost: list[str] = []
    for training, seed in ((True, 0), *((False, seed) for seed in range(TRIES))):
        if seed and not lost:
            break
        found = _gradients(subject, training, seed)
        wild = [name for name, gradient in found.items() if gradient is not None and not gradient.isfinite().all()]
        if wild:
            return failed(f"gradient not finite{' in training' * training}: {', '.join(wild[:8])}")
        zero = [name for name, gradient in found.items() if gradient is None or not (training or gradient.any())]
        lost = [name for name in zero if not seed or name in lost]
        if training and lost:
            break
    maps = sum(name.startswith("map ") for name in found)
    return (
        failed(f"gradient missing: {', '.join(lost[:8])}")
        if lost
        else passed(f"{maps} maps and {len(found) - maps} parameters")
    )


def _gradients(subject: HeadSubject, training: bool, seed: int) -> dict[str, Tensor | None]:
    """Returns gradients of a random scalar of all outputs, for maps and parameters."""
    head = subject.build(seed=seed).head.train(training)
    maps = [feature.requires_grad_() for feature in subject.maps()]
    logits, others = head.with_auxiliary(maps)
    outs = [logits, *others]
    sources: dict[str, Tensor] = {f"map {i}": feature for i, feature in enumerate(maps)}
    sources |= {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
    probes = [normal(*out.shape, seed=8 + i) for i, out in enumerate(outs)]
    return dict(zip(sources, torch.autograd.grad(outs, list(sources.values()), probes, allow_unused=True), strict=True))
