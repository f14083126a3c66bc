"""Joins and splits the q, k, v and gate projections of a checkpoint, as the model has them fused or separate."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention

NAMES = {name: name for name in ("q", "k", "v", "kv", "qk", "qkv", "qg", "qkvg")} | {"gate": "g"}
"""Names of linear layers, and the letters of what they project, which has as many rows each."""


def fit_projections(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state dict whose q, k, v, gate projections are joined and split as the attention layers of a model have them.

    Files have `qkv`, or `q` and `kv`, or `q`, `k`, `v` (or some of them), and the gate's rows in `gate`, `qg` or
    `qkvg`. A layer has `qkv`, which holds what its mechanism projects, or `q` and `kv`, and perhaps `gate`. What a
    layer does not project (the keys, where they are the queries) is left out; what a file does not have stays missing.
    """
    fitted = dict(state)
    for prefix, module in model.named_modules():
        if not hasattr(module, "projections") or isinstance(module, Attention):
            continue
        for leaf in ("weight", "bias"):
            given = {name: fitted.pop(f"{prefix}.{name}.{leaf}", None) for name in NAMES}
            parts = {
                letter: rows
                for name, letters in NAMES.items()
                if (joined := given[name]) is not None and joined.ndim and len(joined) % len(letters) == 0
                for letter, rows in zip(letters, joined.chunk(len(letters)), strict=True)
            }
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
