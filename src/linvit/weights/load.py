"""Loads official checkpoints, and linvit's own, into a model (`load_pretrained`)."""

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
    """Result of loading for every tensor of a model and of a file. Names are the model's."""

    source: str
    layout: str  # the key layout of the file, such as "pvt"
    key: str = ""  # place of the weights: "model", "state_dict.ema.network", or "" if they were not nested
    other_keys: tuple[str, ...] = ()  # other keys beside it
    loaded: list[str] = field(default_factory=list)  # unchanged
    resized: dict[str, str] = field(default_factory=dict)  # to another grid or width, with the shapes
    # Parameters that the file cannot have, with the reason: a classifier of other classes, another attention.
    # They keep their initial values; a classifier of other classes is set to zero.
    initialised: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # required but absent, or of another shape, with the reason
    unexpected: list[str] = field(default_factory=list)  # names of the file that the model does not have
    # Fraction of the model that was loaded or resized, by number of values, between 0 and 1. The classifier and the
    # parameters of another attention do not count, nor a head that the file does not have.
    fraction: float = 1.0
    # Part that the fraction refers to: "backbone"; "network" if the file also has its head; or "head" if it has only
    # that, as DINOv2's. The classifier counts then.
    part: str = "backbone"

    def __str__(self) -> str:
        """Returns a few lines with the counts and the first names."""
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
    """Returns the first names, and the number of the others."""
    names = [re.sub(r"\s+", " ", name)[:60] for name in names]
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _reasons(names: Mapping[str, str]) -> str:
    """Returns each reason once, with the first names that have it."""
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

    The three channels of the first convolution are fitted to other numbers of them (`for_channels`). Tables with one
    entry per position are resized to the model's grids (see `linvit.Attention.resize_tables`). The training images of a
    file are assumed to be square, unless linvit wrote it with another size. A classifier of other classes is
    set to zero, as in official fine-tuning; in a detector it keeps its values. If the model has another attention
    than the file, the projections are loaded (into the first columns of each head where its output is wider), the
    attention's own parameters keep their values, and a gate that the file does not have begins at 1. A network of a
    backbone and a head accepts weights of such a network, or of its backbone alone; a backbone accepts its part of a
    network.

    Args:
        model: A backbone, or a network as created by `linvit.create_segmentor`.
        source: A path (.pth, .pt, .bin, .safetensors, a linvit .ckpt), a state dict, or a repository of the hub
            (`hf-hub:owner/name`).
        ema: True loads averaged weights (`state_dict_ema`, or `ema.network` in a linvit .ckpt). None loads the weights
            of the published scores: `model`, else the averaged weights, else `state_dict`; of a linvit
            .ckpt the plain weights, as `predict_with: raw` does.
        min_fraction: Minimum fraction of the backbone's values that the source must supply; of the network's, if the
            source has its head.

    Returns:
        The names that were loaded, resized, initialised, missing and unexpected.

    Raises:
        UserError: If the source cannot be read, has non-finite values, or supplies less than `min_fraction`; the model
            is then unchanged.

    Example:
        >>> model = linvit.create_backbone("flatten_swin_tiny", num_classes=10, img_size=384)
        >>> print(linvit.load_pretrained(model, "FLatten_Swin_T.pth"))
    """
    return load_weights(model, read(source, ema), min_fraction)


def load_weights(model: nn.Module, weights: Weights, min_fraction: float = 0.9) -> Report:
    """Loads weights that were already read; see `load_pretrained`."""
    if not 0 <= min_fraction <= 1:
        raise UserError(f"min_fraction must be between 0 and 1; got {min_fraction}")
    layout, state = translate(model, weights)
    values, report = match(model, state, weights)
    report.layout = layout
    if report.fraction < min_fraction:
        raise UserError(_refusal(report, weights, min_fraction))
    if bad := not_finite(model, {"state_dict": values}):
        raise UserError(f"{weights.source} has non-finite weights; nothing was changed: {quote_first(bad)}")
    model.load_state_dict(values, strict=False)
    for name, module in model.named_modules():
        if isinstance(module, OutputGate) and f"{name}.weight" in report.initialised:
            module.init_open()
    return report


def translate(model: nn.Module, weights: Weights) -> tuple[str, dict[str, Tensor]]:
    """Finds the layout whose names fit most of the model; returns its name and the weights under the model's names."""
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
    """Returns the weights of a backbone, under the names of the source, and the other weights, under linvit's."""
    whole = {f"backbone.{name}": tensor for name, tensor in weights.state.items()} if weights.beside else weights.state
    whole = {**whole, **weights.beside}
    for layout in NETWORKS:
        if layout.recognises(whole):
            found = layout.translate(whole)
            alone = all(name.startswith("head.") for name in found)
            return (layout.name, {}, found) if alone else (layout.name, *split(found))
    return "", weights.state, weights.beside


def backbone_of(model: nn.Module) -> nn.Module:
    """Returns the backbone of a network with a head; else the model itself."""
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
            report.initialised[name] = "the file has only a head"
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
    """Returns a kernel (D, 3, h, w) fitted to another number of channels, as timm does; other kernels unchanged.

    One channel gets the sum of the three. More channels get them in turn, multiplied by three over their number, which
    preserves the scale of the output.
    """
    channels = own.shape[1] if own.ndim == 4 else 3
    if given.shape != (*own.shape[:1], 3, *own.shape[2:]) or channels == 3:
        return given
    if channels == 1:
        return given.sum(1, keepdim=True)
    return given.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)


def _heads(model: nn.Module) -> tuple[str, ...]:
    """Returns the prefixes of the classifiers' parameters, including those of a network's head."""
    found = [*classifiers(model)]
    for module in model.modules():
        of_head: Any = getattr(module, "classifiers", None)
        found += of_head() if callable(of_head) else []
    named = (f"{name}." for name, module in model.named_modules() if any(module is one for one in found))
    return (*named, "head.", "head_dist.") if backbone_of(model) is model else tuple(named)


def _no_head(model: nn.Module, state: Mapping[str, Tensor], classifiers: tuple[str, ...]) -> str:
    """Returns why a file has no values for the head of a network; empty if it has, or if the model has no head."""
    if backbone_of(model) is model:
        return ""
    beside = [name for name in state if not name.startswith("backbone.")]
    if any(name in model.state_dict() and not name.startswith(classifiers) for name in beside):
        return ""
    return "the file has another head" if beside else "the file has no head"


def _other_attention(model: nn.Module, state: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of the parameters of those mechanisms, stems, norms and gates that the file lacks entirely."""
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
        f"its names have none of the layouts that linvit knows ({known}), nor the model's. They begin "
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
