"""What a checkpoint must hold to be scored, and to be resumed."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def problems(content: Mapping[str, Any], resumed: bool) -> Iterator[str]:
    """Says what a checkpoint lacks, or has of another kind than Lightning and linvit write.

    Args:
        content: The checkpoint, with the mappings `hyper_parameters` and `state_dict`.
        resumed: Whether a run is resumed from it, which needs more than its weights.
    """
    weights, options = content["state_dict"], content["hyper_parameters"]
    if not weights or not all(isinstance(n, str) and isinstance(tensor, Tensor) for n, tensor in weights.items()):
        yield "state_dict is not a mapping of names to tensors"
    if not isinstance(content.get("callbacks", {}), Mapping):
        yield "callbacks is not a mapping"
    names, size = options.get("class_names"), options.get("img_size", 1)
    if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
        yield "class_names is not a list of names"
    if not all(_is_count(side) for side in (size if isinstance(size, list | tuple) else [size])):
        yield f"img_size is {_said(options, 'img_size')}, not a side or two"
    if not _is_count(options.get("num_classes", 1)):
        yield f"num_classes is {_said(options, 'num_classes')}, not a whole number from 0"
    if options.get("ema_decay") and not _is_count(content.get("ema_updates")):
        yield f"ema_updates is {_said(content, 'ema_updates')}, not a whole number from 0"
    if not resumed:
        return
    for name in ("epoch", "global_step"):
        if not _is_count(content.get(name)):
            yield f"{name} is {_said(content, name)}, not a whole number from 0"
    optimizers: Any = content.get("optimizer_states")
    if not _is_list(optimizers) or not all({"state", "param_groups"} <= state.keys() for state in optimizers):
        yield f"optimizer_states is {_said(content, 'optimizer_states')}, not a list with the state of an optimizer"
    if not _is_list(content.get("lr_schedulers")):
        yield f"lr_schedulers is {_said(content, 'lr_schedulers')}, not a list with the state of a schedule"
    if epochs_done(content) is None:
        yield f"loops is {_said(content, 'loops')}, not the progress of a training run"


def epochs_done(content: Mapping[str, Any]) -> int | None:
    """How many epochs a run had finished, or None if the checkpoint does not say it as Lightning does."""
    try:
        fit = content["loops"]["fit_loop"]
        counts = [fit["epoch_progress"]["current"], fit["epoch_loop.batch_progress"]["total"]]
        known = all(_is_count(count[name]) for count in counts for name in ("ready", "completed", "processed"))
        return counts[0]["processed"] if known and isinstance(fit["state_dict"], Mapping) else None
    except (KeyError, TypeError):
        return None


def stopped_early(content: Mapping[str, Any]) -> bool:
    """Whether Lightning's `EarlyStopping` has ended the run."""
    states = content.get("callbacks", {})
    return any(
        str(name).startswith("EarlyStopping") and isinstance(state, Mapping) and bool(state.get("stopped_epoch"))
        for name, state in states.items()
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(state, dict) for state in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _said(content: Mapping[str, Any], name: str) -> str:
    """A value, in short."""
    if name not in content:
        return "missing"
    value = content[name]
    return repr(value) if isinstance(value, int | float | str | None) or not value else f"a {type(value).__name__}"
