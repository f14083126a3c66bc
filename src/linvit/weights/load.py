"""`load_pretrained` loads official checkpoints, and linvit's own, into a model."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention
from linvit.backbones.initialise import classifiers
from linvit.errors import UserError, quote_first
from linvit.finite import not_finite
from linvit.io.plain_text import printable
from linvit.layers.hosting import ConvStem, OutputGate
from linvit.layers.resize_tables import resize_tables
from linvit.weights.fit import fit_projections, widen_outputs
from linvit.weights.layouts.backbones import LAYOUTS
from linvit.weights.layouts.layout import OWN
from linvit.weights.layouts.networks import NETWORKS
from linvit.weights.read import Weights, read, split


@dataclass
class Report:
    """Says what happened to every tensor of a model and of a file. Names are the model's."""

    source: str
    layout: str  # the key layout of the file, such as "pvt"
    key: str = ""  # where the weights were: "model", "state_dict.ema.network", or "" if they were not nested
    other_keys: tuple[str, ...] = ()  # beside it
    loaded: list[str] = field(default_factory=list)  # as they are in the file
    resized: dict[str, str] = field(default_factory=dict)  # to another grid or width, with the shapes
    # What the file cannot have, with the reason: a classifier of other classes, the parameters of another attention.
    # They keep their initial values; a classifier of other classes is zero.
    initialised: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # what it should have, or of another shape, with the reason
    unexpected: list[str] = field(default_factory=list)  # names of the file that the model does not have
    # The part of the model that was loaded or resized, counted in numbers, between 0 and 1. The classifier and the
    # parameters of another attention do not count, nor a head that the file does not have.
    fraction: float = 1.0
    # What the fraction is of: "backbone"; "network" if the file has the head of one, too; or "head" if it has nothing
    # else, as DINOv2's. The classifier counts then.
    part: str = "backbone"

    def __str__(self) -> str:
        """A few lines with the counts and the first names."""
        origin = f", from {self.key}" if self.key else ""
        beside = f" (beside it: {first_of(self.other_keys, 8)})" if self.other_keys else ""
        lines = [
            f"weights from {self.source}: {self.layout} names{origin}{beside}, {self.fraction:.1%} of the {self.part}"
        ]
        for kind in ("loaded", "resized", "initialised", "missing", "unexpected"):
            names = getattr(self, kind)
            shown = _reasons(names) if isinstance(names, dict) else "" if kind == "loaded" else first_of(names)
            lines.append(f"  {kind:<12}{len(names):>5}  {shown}".rstrip())
        return printable("\n".join(lines))


def first_of(names: Iterable[str], count: int = 3) -> str:
    """The first names, and how many more there are."""
    names = [re.sub(r"\s+", " ", name)[:60] for name in names]
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _reasons(names: Mapping[str, str]) -> str:
    """Each reason once, with the first names that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in names.items():
        by_reason.setdefault(reason, []).append(name)
    parts = [f"{first_of(some, 2)} ({reason})" for reason, some in by_reason.items()]
    return "; ".join(parts[:3]) + ("; ..." if len(parts) > 3 else "")


def load_pretrained(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    *,
    ema: bool | None = None,
    min_fraction: float = 0.9,
) -> Report:
    """Loads an official checkpoint, or one of linvit's, into a model. Nothing in a file is executed.

    The first convolution's three channels are fitted to another number of them (`for_channels`). Tables with an entry
    per position are resized to the grids of the model (see `linvit.Attention.resize_tables`). The images of a file are
    taken for square, unless linvit wrote it and it says otherwise. A classifier of another number of classes is set to
    zero, as the official fine-tuning does, or in a detector left as it was built. If the model has another attention
    than the file, the projections are loaded (into the first columns of each head where its output is wider), the
    attention's own parameters stay as they are, and a gate that the file does not have begins at 1. A network of a
    backbone and a head takes weights of the like, or those of its backbone alone; a backbone takes its part of a
    network.

    Args:
        model: A backbone, or a network such as `linvit.create_segmentor` makes.
        source: A path (.pth, .pt, .bin, .safetensors, a linvit .ckpt), a state dict, or a repository of the hub
            (`hf-hub:owner/name`).
        ema: Whether to load averaged weights (`state_dict_ema`, or `ema.network` in a linvit .ckpt). None loads what
            the published scores were measured with: `model`, else the averaged weights, else `state_dict`; of a linvit
            .ckpt the plain weights, as `predict_with: raw` does.
        min_fraction: The least fraction of the backbone's numbers that the source must supply; of the network's, if the
            source has its head.

    Returns:
        The names that were loaded, resized, initialised, missing and unexpected.

    Raises:
        UserError: If the source cannot be read, is not finite, or supplies less than `min_fraction`; the model is then
            as it was.

    Example:
        >>> model = linvit.create_backbone("flatten_swin_tiny", num_classes=10, img_size=384)
        >>> print(linvit.load_pretrained(model, "FLatten_Swin_T.pth"))
    """
    return load_weights(model, read(source, ema), min_fraction)


def load_weights(model: nn.Module, weights: Weights, min_fraction: float = 0.9) -> Report:
    """Loads weights that are read already; see `load_pretrained`."""
    if not 0 <= min_fraction <= 1:
        raise UserError(f"min_fraction must lie between 0 and 1; got {min_fraction}")
    layout, state = translate(model, weights)
    values, report = match(model, state, weights)
    report.layout = layout
    if report.fraction < min_fraction:
        raise UserError(_refusal(report, weights, min_fraction))
    if bad := not_finite(model, {"state_dict": values}):
        raise UserError(f"{weights.source} holds weights that are not finite; nothing was changed: {quote_first(bad)}")
    model.load_state_dict(values, strict=False)
    for name, module in model.named_modules():
        if isinstance(module, OutputGate) and f"{name}.weight" in report.initialised:
            module.init_open()
    return report


def translate(model: nn.Module, weights: Weights) -> tuple[str, dict[str, Tensor]]:
    """Finds the layout whose names fit most of the model; returns its name, and the weights under the model's names."""
    network, state, beside = parts(weights)
    backbone = backbone_of(model)
    own = backbone.state_dict().keys()
    candidates = [layout for layout in LAYOUTS if layout.recognises(state)] + [OWN]
    translated = [(layout, fit_projections(layout.translate(state), backbone)) for layout in candidates]
    layout, found = max(translated, key=lambda candidate: len(own & candidate[1].keys()))
    names = [network, layout.name] if layout is not OWN or not network else [network]
    if backbone is not model:
        found = {**{f"backbone.{name}": tensor for name, tensor in found.items()}, **fit_projections(beside, model)}
    return ", ".join(name for name in names if name), found


def parts(weights: Weights) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a backbone, under the names of their source, and those beside it, under ours."""
    whole = {f"backbone.{name}": tensor for name, tensor in weights.state.items()} if weights.beside else weights.state
    whole = {**whole, **weights.beside}
    for layout in NETWORKS:
        if layout.recognises(whole):
            found = layout.translate(whole)
            alone = all(name.startswith("head.") for name in found)
            return (layout.name, {}, found) if alone else (layout.name, *split(found))
    return "", weights.state, weights.beside


def backbone_of(model: nn.Module) -> nn.Module:
    """The backbone of a network that has a head, too; else the model itself."""
    backbone = getattr(model, "backbone", None)
    return backbone if isinstance(backbone, nn.Module) else model


def match(model: nn.Module, state: Mapping[str, Tensor], weights: Weights) -> tuple[dict[str, Tensor], Report]:
    """Compares the weights with the model: returns the values to load, under the model's names, and the report."""
    report = Report(weights.source, "", weights.key, weights.other_keys)
    values: dict[str, Tensor] = {}
    own_state = model.state_dict()
    heads = _heads(model)
    other_attention = _other_attention(model, state)
    head_alone = backbone_of(model) is not model and bool(state) and all(name.startswith("head.") for name in state)
    no_head = "" if head_alone else _no_head(model, state, heads)
    report.part = "head" if head_alone else "backbone" if no_head or backbone_of(model) is model else "network"
    keeps = getattr(getattr(model, "head", None), "keeps_classifiers", False)
    resized = widen_outputs(model, resize_tables(model, state, weights.img_size))
    matched = total = 0
    for name, own in own_state.items():
        given = state.get(name)
        head = name.startswith(heads)
        if head_alone and not name.startswith("head."):
            report.initialised[name] = "the file has a head alone"
            continue
        if no_head and not name.startswith("backbone."):
            if own.is_floating_point():
                report.initialised[name] = no_head
            continue
        if given is None:
            if not own.is_floating_point():
                continue  # a counter of batches
            if head or name in other_attention:
                report.initialised[name] = "the file has no classifier" if head else "the file has another attention"
                continue
            report.missing[name] = "not in the file"
        elif head and given.ndim and given.shape[1:] == own.shape[1:] and given.shape != own.shape:
            if keeps:
                report.initialised[name] = f"as built: the file has {len(given)} outputs, the model {len(own)}"
                continue
            report.initialised[name] = f"zero: the file has {len(given)} classes, the model {len(own)}"
            values[name] = torch.zeros_like(own)
        elif (value := for_channels(resized[name], own)).shape != own.shape:
            report.missing[name] = f"{_shape(given)} in the file, {_shape(own)} in the model"
        else:
            values[name] = value
            if value is given:
                report.loaded.append(name)
            else:
                report.resized[name] = f"{_shape(given)} to {_shape(own)}"
            matched += own.numel() if head_alone or not head else 0
        total += own.numel() if head_alone or not head else 0
    report.unexpected = [name for name in state if name not in own_state]
    report.fraction = matched / total if total else 1.0
    return values, report


def for_channels(given: Tensor, own: Tensor) -> Tensor:
    """A kernel of three input channels (D, 3, h, w) for images of another number, as timm fits it; others as they are.

    One channel gets the sum of the three. More get them in turn, times three over their number, which keeps the size
    of what comes out.
    """
    channels = own.shape[1] if own.ndim == 4 else 3
    if given.shape != (*own.shape[:1], 3, *own.shape[2:]) or channels == 3:
        return given
    if channels == 1:
        return given.sum(1, keepdim=True)
    return given.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)


def _heads(model: nn.Module) -> tuple[str, ...]:
    """The prefixes of the classifiers' parameters, those of a network's head included."""
    found = [*classifiers(model)]
    for module in model.modules():
        of_head: Any = getattr(module, "classifiers", None)
        found += of_head() if callable(of_head) else []
    named = (f"{name}." for name, module in model.named_modules() if any(module is one for one in found))
    return (*named, "head.", "head_dist.") if backbone_of(model) is model else tuple(named)


def _no_head(model: nn.Module, state: Mapping[str, Tensor], classifiers: tuple[str, ...]) -> str:
    """Why a file has nothing for the head of a network; empty if it has, or if the model has no head."""
    if backbone_of(model) is model:
        return ""
    beside = [name for name in state if not name.startswith("backbone.")]
    if any(name in model.state_dict() and not name.startswith(classifiers) for name in beside):
        return ""
    return "the file has another head" if beside else "the file has no head"


def _other_attention(model: nn.Module, state: Mapping[str, Tensor]) -> set[str]:
    """The names of all parameters of those mechanisms, stems, norms and gates of which the file has no parameter."""
    found: set[str] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, Attention | ConvStem | OutputGate) or prefix.endswith(".out_norm"):
            names = {f"{prefix}.{name}" for name in module.state_dict()}
            if not names & state.keys():
                found |= names
    return found


def _refusal(report: Report, weights: Weights, min_fraction: float) -> str:
    known = ", ".join(layout.name for layout in (*LAYOUTS, *NETWORKS))
    families = " and ".join(layout.name for layout in LAYOUTS if layout.recognises(weights.state))
    whose = weights.model or (families and f"a model with the names of {families}")
    what = (
        f"its names are of no layout that linvit knows ({known}), nor the model's. They begin "
        f"{first_of(list(weights.state), 6)}"
        if report.layout == OWN.name and not report.loaded and not whose
        else f"it is of {whose or 'another model'}. Name the backbone that it belongs to, or lower min_fraction\n"
        f"{report}"
    )
    return (
        f"{weights.source} supplies {report.fraction:.1%} of the {report.part}, less than "
        f"min_fraction = {min_fraction:.0%}; nothing was changed: {what}"
    )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
