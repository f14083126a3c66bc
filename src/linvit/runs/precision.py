"""The precision of a run that names none."""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info


def default_precision(accelerator: Any) -> str:
    """`bf16-mixed` on CUDA devices that compute in bfloat16, else `32-true`; says which, in one line.

    Args:
        accelerator: `trainer.accelerator`.
    """
    cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if cuda and torch.cuda.is_bf16_supported(including_emulation=False):
        rank_zero_info("precision bf16-mixed, since the device has bfloat16; --trainer.precision names another one")
        return "bf16-mixed"
    rank_zero_info(
        "precision 32-true, since no CUDA device with bfloat16 is used; --trainer.precision names another one"
    )
    return "32-true"
