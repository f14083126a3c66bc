"""Parses specs, mappings and sizes from a shell."""

from typing import Any

from linvit.errors import UserError
from linvit.registry import Registry, Spec
from linvit.runs import yaml_text

HINT = "Write it like '{option: value}', in quotes"


def read_spec(registry: Registry, text: str) -> Spec:
    """Returns a name, or a mapping with `name` and options, as a spec."""
    return read_value(f"the {registry.kind}", text) if text.lstrip().startswith("{") else text


def parse_sizes(option: str, text: str) -> list[tuple[int, int]]:
    """Returns sizes (H, W), each once, from sides and sizes such as "14,14x28"."""
    found = []
    for part in text.lower().split(","):
        sides = part.strip().split("x")
        if len(sides) > 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
            raise UserError(f"{option} takes sizes such as 14 or 14x28 (H x W), with commas; got '{part}'")
        found.append((int(sides[0]), int(sides[-1])))
    return list(dict.fromkeys(found))


def usable_device(name: str) -> str:
    """Returns the name of a device if this machine has it; otherwise raises a `UserError` with the available ones."""
    import torch

    try:
        torch.zeros(1, device=name).cpu()  # fails for `meta`, which has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        has = f"cpu and {torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "only cpu"
        reason = str(error).partition("\n")[0]
        raise UserError(f"--device {name} cannot be used ({reason}); this machine has {has}") from error
    return name


def read_value(what: str, text: str) -> Any:
    """Parses JSON or YAML like a configuration."""
    try:
        return yaml_text.load(text, what)
    except UserError:
        raise
    except Exception as error:  # the loader's exceptions
        raise UserError(f"{what} {text!r} is neither JSON nor YAML. {HINT}") from error
