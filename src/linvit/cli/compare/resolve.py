"""Complete configurations of the variants of a grid, read by the parser of `linvit fit` and checked by building."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from linvit.data.base import ImageData
from linvit.errors import UserError, find_user_error
from linvit.experiments.compare.grid import Sweep, place
from linvit.runs.parser import build_task
from linvit.runs.run import Run
from linvit.tasks.pretrained import skip_pretrained

Config = dict[str, Any]


def resolve(grid: Sweep) -> dict[str, Config]:
    """The complete configuration of each variant; the model of each is built, without memory for its weights.

    Raises:
        UserError: If an option does not exist or a value is not allowed, or if two variants are the same. It names
            the variant.
    """
    base = Run("fit", [part for config in grid.configs for part in ("--config", config)]).config
    for key, value in grid.settings.items():
        place(base, key, value)
    found: dict[str, Config] = {}
    made: dict[str, ImageData] = {}  # data modules by their configuration
    for name, settings in grid.variants.items():
        config = copy.deepcopy(base)
        for key, value in settings.items():
            place(config, key, value)
        try:
            run = _read(config)
            key = repr(run.settings.data)
            run.data = made[key] = made.get(key) or run.data
            _build(run)
        except Exception as error:
            mistake = find_user_error(error)
            if mistake is None:
                raise
            given = ", ".join(f"{key}={value}" for key, value in settings.items())
            raise UserError(f"the variant '{name}' ({given}) cannot be run: {mistake}") from error
        for other, before in found.items():
            if before == run.config:
                raise UserError(f"the variants '{other}' and '{name}' are the same run. Leave one of them out")
        found[name] = run.config
    return found


def _read(config: Config) -> Run:
    """The run of a configuration in memory."""
    with tempfile.TemporaryDirectory(prefix="linvit-compare-") as folder:
        path = Path(folder, "run.yaml")
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return Run("fit", [f"--config={path}"])


def _build(run: Run) -> None:
    """Builds the task on the meta device, where no weights are stored, or where it cannot be built, on the CPU."""
    facts = run.facts
    with skip_pretrained():
        try:
            with torch.device("meta"):
                build_task(run.settings.model, **facts)
        except UserError:
            raise
        except Exception:
            build_task(run.settings.model, **facts)
