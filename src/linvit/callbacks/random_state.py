"""The state of the random generators of this process, as tensors: torch's, the device's, numpy's and Python's."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linvit.errors import UserError


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of every global generator, as tensors of fixed size. float64 holds numbers of 32 bits exactly."""
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    keys, place = legacy["state"]["key"], legacy["state"]["pos"]  # 624 numbers of 32 bits, and one more
    _, words, gauss = random.getstate()  # 625 numbers of 32 bits, and perhaps a normal one for the next call
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*keys.tolist(), place, legacy["has_gauss"], legacy["gauss"]], dtype=torch.float64),
        "python": torch.tensor([*words, gauss is not None, gauss or 0], dtype=torch.float64),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Sets every global generator to a state that `random_state` returned; another device's keeps its own.

    Raises:
        UserError: If it is no such state.
    """
    # copies, since of a view torch would read what lies before it, or crash
    state = {name: part.cpu().clone() for name, part in state.items()}
    try:
        *keys, place, has_gauss, gauss = state["numpy"].tolist()
        if not 0 <= place <= len(keys):  # numpy does not check
            raise ValueError(f"numpy's generator has no number {place}")
        np.random.set_state(("MT19937", np.array(keys, np.uint32), int(place), int(has_gauss), gauss))
        *words, has_gauss, gauss = state["python"].tolist()
        random.setstate((3, tuple(map(int, words)), gauss if has_gauss else None))
        torch.set_rng_state(state["torch"])
        if device.type in state:
            torch.get_device_module(device).set_rng_state(state[device.type])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(
            f"the states of the random generators in the checkpoint cannot be used ({error}); the file may be damaged"
        ) from error
