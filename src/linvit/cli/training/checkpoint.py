"""What a checkpoint says, read safely and checked before anything expensive starts."""

from pathlib import Path
from typing import Any

from torch import nn

from linvit.errors import UserError
from linvit.weights import torch_file


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, with `hyper_parameters` and `state_dict`. Nothing in the file is executed.

    Raises:
        UserError: If the file is missing, incomplete, not loadable without running code, or not one of linvit's.
    """
    path = Path(path)
    if not path.is_file():
        others = (
            sorted(path.parent.glob("*.ckpt")) if path.parent.is_dir() else sorted(Path("checkpoints").rglob("*.ckpt"))
        )
        found = f" There are: {', '.join(map(str, others[:5]))}" if others else ""
        raise UserError(f"there is no checkpoint at '{path}'.{found}")
    start = f"\nTo start from the weights of another program: --model.pretrained={path}, without --ckpt_path"
    try:
        checkpoint = torch_file.load(path, objects=False)
    except UserError as error:
        raise UserError(f"checkpoint {error}; others may lie in {path.parent}{start}") from error
    if not isinstance(checkpoint, dict) or not {"hyper_parameters", "state_dict"} <= checkpoint.keys():
        holds = ", ".join(map(str, checkpoint)) if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise UserError(
            f"'{path}' is not a checkpoint of a linvit run: it holds {holds[:200]}, not hyper_parameters and "
            f"state_dict{start}"
        )
    return checkpoint


def check_same_model(path: str | Path, weights: dict[str, Any], model: nn.Module) -> None:
    """Raises a `UserError` that names the first differences if a checkpoint's weights do not fit the model."""
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in weights]
    wrong += [f"{name} is unknown" for name in weights if name not in own]
    wrong += [
        f"{name} is {tuple(weights[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"checkpoint '{path}' belongs to another model: {'; '.join(wrong[:3])}{more}")
