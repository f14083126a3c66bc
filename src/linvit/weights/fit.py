"""Fits the tensors of a checkpoint to a model: joins and splits projections."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention
from linvit.layers.hosting import AttentionHost
from linvit.layers.projections import copy_outputs

NAMES = {name: name for name in ("q", "k", "v", "kv", "qk", "qkv", "qg", "qkvg")} | {"gate": "g"}
"""Names of linear layers, and the letters of the projections that they join, with equally many rows each."""


def fit_projections(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Returns a state dict with q, k, v and gate projections joined and split as in the attention layers of a model.

    Files have `qkv`, or `q` and `kv`, or `q`, `k`, `v` (or some of them), and the gate's rows in `gate`, `qg` or
    `qkvg`. A layer has `qkv`, with the projections that its mechanism uses, or `q` and `kv`, and perhaps `gate`.
    Projections that a layer lacks (the keys, where they are the queries) are left out; those that a file lacks stay
    missing.
    timm's EVA has `q_proj`, `k_proj` and `v_proj`, its BEiT `q_bias` and `v_bias`; keys without a bias get zeros.
    """
    fitted = dict(state)
    for prefix, module in model.named_modules():
        if not hasattr(module, "projections") or isinstance(module, Attention):
            continue
        for leaf in ("weight", "bias"):
            others = {name: (f"{prefix}.{name}_proj.{leaf}", f"{prefix}.{name}_{leaf}") for name in "qkv"}
            fitted |= {f"{prefix}.{name}.{leaf}": fitted.pop(o) for name in "qkv" for o in others[name] if o in fitted}
            given = {name: fitted.pop(f"{prefix}.{name}.{leaf}", None) for name in NAMES}
            parts = {
                letter: rows
                for name, letters in NAMES.items()
                if (joined := given[name]) is not None and joined.ndim and len(joined) % len(letters) == 0
                for letter, rows in zip(letters, joined.chunk(len(letters)), strict=True)
            }
            if leaf == "weight":
                weights = parts
            elif "k" in weights and parts.keys() & {"q", "k", "v"} == {"q", "v"}:
                parts["k"] = torch.zeros_like(parts["q"])
            for name, letters in NAMES.items():
                own = getattr(getattr(module, name, None), leaf, None)
                joined = given[name]
                if own is None:
                    continue
                if joined is None or joined.shape != own.shape:
                    wanted = module.projections if name == "qkv" else letters
                    found = [parts[letter] for letter in wanted if letter in parts]
                    if len(found) == len(wanted) and len({part.shape[1:] for part in found}) == 1:
                        joined = torch.cat(found)
                if joined is not None:
                    fitted[f"{prefix}.{name}.{leaf}"] = joined
    return fitted


def widen_outputs(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state dict with wider output projections for mechanisms whose outputs have more channels than values.

    The first columns of each head come from the file, as in `keep_weights`; further columns are the model's own.
    """
    widened = dict(state)
    for prefix, module in model.named_modules():
        if not isinstance(module, AttentionHost) or (given := state.get(name := f"{prefix}.proj.weight")) is None:
            continue
        mechanisms = [part for part in module.modules() if isinstance(part, Attention)]
        own = module.proj.weight.detach().clone()
        if given.shape == (len(own), sum(part.dim for part in mechanisms)) != own.shape:
            copy_outputs(given, own, [(part.num_heads, part.out_heads) for part in mechanisms])
            widened[name] = own
    return widened
