"""Parameter groups: which parameters are decayed, and their learning rates."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from timm.models import group_parameters
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from linvit.errors import UserError


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    layer_decay: float | None = None,
    backbone_lr_scale: float = 1.0,
    no_decay: Sequence[str] | None = None,
    lr_scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Groups of parameters for an optimiser: with and without weight decay, for each learning rate.

    1-D tensors (norms, biases) are not decayed, nor parameters that a submodule's `no_weight_decay()` names, also by
    patterns. With `no_decay`, all are decayed except those whose names contain one of its texts, as in mmsegmentation.
    Layer-wise learning-rate decay (ELECTRA, Clark et al. 2020; BEiT, Bao et al. 2022) multiplies the learning rate by
    `layer_decay` once per layer down from the last, in submodules that group their parameters by layer
    (`group_matcher`, timm's contract); all others keep it. In a submodule with a classifier (`get_classifier`, the same
    contract), all other parameters have `backbone_lr_scale` times the classifier's peak, as in CSWin's fine-tuning
    (Dong et al. 2022). `lr_scales` are factors on the peak of parameters, by their names in the model.
    """
    named: set[str] = set()
    scales: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if callable(getattr(module, "no_weight_decay", None)):
            named |= {start + name for name in module.no_weight_decay()}
        if layer_decay is not None and callable(getattr(module, "group_matcher", None)):
            layers = group_parameters(module, module.group_matcher(coarse=False), reverse=True)
            last = max(layers.values())
            own = {start + name: layer_decay ** (last - layer) for name, layer in layers.items()}
            scales = own | scales  # where one is within another, such as a stem that is a ResNet, the outer one says
        if backbone_lr_scale != 1 and callable(getattr(module, "get_classifier", None)):
            found = module.get_classifier()  # one, or several
            parts = found if isinstance(found, tuple | list) else (found,)
            head = {id(parameter) for part in parts for parameter in part.parameters()}
            peaks |= {
                start + name: backbone_lr_scale
                for name, parameter in module.named_parameters()
                if id(parameter) not in head
            }
    if layer_decay is not None and not scales:
        raise UserError(
            "layer_decay needs a network that says the layer of each parameter, by timm's group_matcher(), and "
            "this one does not: set --model.layer_decay=null"
        )
    for name, factor in (lr_scales or {}).items():
        peaks[name] = peaks.get(name, 1.0) * factor
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale, peak = scales.get(name, 1.0), peaks.get(name, 1.0)
            if no_decay is None:
                decayed = parameter.ndim > 1 and not any(fnmatchcase(name, pattern) for pattern in named)
            else:
                decayed = not any(fragment in name for fragment in no_decay)
            decay = weight_decay if decayed else 0.0
            empty = {"params": [], "lr": lr * peak * scale, "peak_scale": peak, "weight_decay": decay}
            groups.setdefault((-peak, -scale, not decayed), empty)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def adamw(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], fused: bool) -> AdamW:
    """Builds AdamW. The fused one is faster, and skips a step without synchronising if its `found_inf` is set."""
    optimizer = AdamW(groups, lr=lr, betas=betas, fused=fused or None)
    # Else the loss scaler of 16-mixed leaves it to the optimiser to unscale, and Lightning refuses to clip before.
    optimizer._step_supports_amp_scaling = False
    optimizer.register_step_post_hook(lambda *_: setattr(optimizer, "_step_supports_amp_scaling", False))

    def keep_fused(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**group, "fused": fused or None} for group in state["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(keep_fused)
    return optimizer


def look_ahead(optimizer: Optimizer, steps: int) -> None:
    """Takes weights half-way back to where they last were, after the first step and every so many from there.

    Lookahead (Zhang et al. 2019) as a hook of the optimiser, whose state has the slow weights; GeoSeg also starts so. A
    step that is skipped (`found_inf`, or no gradients) leaves both as they are.
    """

    @torch.no_grad()
    def follow(*_: Any) -> None:
        skipped: Tensor | None = getattr(optimizer, "found_inf", None)
        for group in optimizer.param_groups:
            taken = group.get("lookahead_step", 0)
            group["lookahead_step"] = taken + 1
            for weight in group["params"] if taken % steps == 0 else ():
                if weight.grad is not None:  # else the optimiser has not begun with it, or has skipped the step
                    state = optimizer.state[weight]
                    before = state.get("slow", weight)
                    slow = before.lerp(weight, 0.5)
                    state["slow"] = slow if skipped is None else slow.where(skipped == 0, before)
                    weight.copy_(slow if skipped is None else slow.where(skipped == 0, weight))

    optimizer.register_step_post_hook(follow)
