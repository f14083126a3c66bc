"""The state of the random generators of this process, as plain values: torch's, the device's, numpy's and Python's."""

import random
from typing import Any

import numpy as np
import torch

from linvit.errors import UserError


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every global generator."""
    numbers: dict[str, Any] = np.random.get_state(legacy=False)
    numbers["state"] = {**numbers["state"], "key": numbers["state"]["key"].tolist()}
    state = {"torch": torch.get_rng_state(), "numpy": numbers, "python": random.getstate()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets every global generator to a state that `random_state` returned; another device's keeps its own.

    Raises:
        UserError: If it is not such a state.
    """
    try:
        numbers = state["numpy"]["state"]
        if not 0 <= numbers["pos"] <= len(numbers["key"]):  # numpy does not check
            raise ValueError(f"numpy's generator has no number {numbers['pos']}")
        np.random.set_state({**state["numpy"], "state": {**numbers, "key": np.array(numbers["key"], np.uint32)}})
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"].cpu().clone())  # of a view torch would read what lies before it, or crash
        if device.type in state:
            torch.get_device_module(device).set_rng_state(state[device.type].cpu().clone())
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(
            f"the states of the random generators in the checkpoint cannot be used ({error}); the file may be damaged"
        ) from error
