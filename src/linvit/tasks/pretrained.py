"""`pretrained`: the weights that a task's network starts from, unless a checkpoint brings its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from linvit.errors import UserError, check_choice
from linvit.registry.signatures import parameters_of

_skipped = ContextVar("skip_pretrained", default=False)


@contextmanager
def skip_pretrained() -> Iterator[None]:
    """Tasks built here do not load `pretrained`: a checkpoint replaces all weights, and the file may be gone."""
    token = _skipped.set(True)
    try:
        yield
    finally:
        _skipped.reset(token)


def checkpoint_follows() -> bool:
    """True if a checkpoint is about to replace all weights, and has decided the options."""
    return _skipped.get()


def without_download(backbone: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """Returns a backbone's spec without weights that it would download, if a checkpoint is about to replace them."""
    named = isinstance(backbone, Mapping) and "pretrained" in backbone and _skipped.get()
    return {**backbone, "pretrained": False} if named else backbone  # type: ignore[dict-item]


def load_initial_weights(network: nn.Module, pretrained: str | Mapping[str, Any] | None) -> None:
    """Loads what `pretrained` says and prints the report; does nothing if it is None or a checkpoint follows."""
    if pretrained is None or _skipped.get():
        return
    from linvit.weights.load import load_pretrained  # knows the layouts of all official checkpoints

    options = {"source": pretrained} if isinstance(pretrained, str) else dict(pretrained)
    allowed = [name for name in parameters_of(load_pretrained) if name != "model"]
    for option in options:
        check_choice("an option of pretrained", option, allowed)
    if not isinstance(options.get("source"), str):
        raise UserError(
            f"pretrained {pretrained!r} names no source. Write pretrained: FILE, or pretrained: {{source: FILE}}"
        )
    rank_zero_info(str(load_pretrained(network, **options)))
