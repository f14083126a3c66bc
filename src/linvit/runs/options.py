"""Configurations as plain nested mappings: read by name, varied by options."""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from linvit.errors import UserError, did_you_mean
from linvit.runs.configs import expand
from linvit.runs.folder import run_config
from linvit.runs.parser import Config, parse
from linvit.runs.saved_config import saved_config

Source = str | Path | Mapping[str, Any]
"""Name of a configuration, its file, the folder of a run, or a configuration itself."""
UNNAMED = {"model": "class_path", "data": "class_path", "teacher": "source", "pretrained": "source"}
"""Keys for the value of an option that becomes a mapping; other options, such as a backbone, have `name`."""


def read_config(source: Source | Sequence[Source], options: Mapping[str, Any] | None = None) -> Config:
    """Reads a configuration with its bases and all defaults.

    Args:
        source: Its name (`linvit list configs`), its file, or the folder of a run, whose configuration is read as data:
            nothing that it names is imported. If there are several sources, later ones override earlier ones.
        options: Options with other values, as in `replace_options`.

    Returns:
        The complete configuration, as `linvit fit --print_config` prints it, with the names of its files as `config`;
        the last one names the folder of the run.

    Raises:
        UserError: If the configuration or an option does not exist, or an option does not accept its value.

    Example:
        >>> config = read_config("quickstart", {"model.attention": "focused", "trainer.max_epochs": 3})
        >>> config["trainer"]["max_epochs"]
        3
    """
    names: list[str] = []
    arguments: list[str] = []
    for each in [source] if isinstance(source, str | Path | Mapping) else source:
        if not isinstance(each, Mapping) and Path(each).is_dir():
            each = saved_config(run_config(Path(each)), trains=False)
        if isinstance(each, Mapping):
            given = [json.dumps({name: value for name, value in each.items() if name != "config"}, default=str)]
            names += each.get("config") or []
        else:
            given = expand(str(each))
            names.append(str(each))
        arguments += [argument for text in given for argument in ("--config", text)]
    config = parse("fit", [*arguments, "--base=null"], names=names)
    return parse("fit", replace_options(config, options)) if options else config


def replace_options(config: Mapping[str, Any], options: Mapping[str, Any]) -> Config:
    """Returns a configuration with other values of some options; the one way to vary a run.

    A value replaces the previous one. Setting an option of a part that is given by name turns it into a mapping: with
    `backbone: deit_nano`, `{"model.backbone.depth": 4}` is `backbone: {name: deit_nano, depth: 4}`. A `+` after the
    name adds to a list. The options are removed from the stages of the configuration (`stages`).

    Args:
        config: A configuration, which stays as it is.
        options: Values by name, as on the command line: `model.attention`, `data.augmentation.hflip`,
            `trainer.callbacks+`.

    Example:
        >>> config = read_config("quickstart")
        >>> replace_options(config, {"model.attention": "linear"})["model"]["init_args"]["attention"]
        'linear'
    """
    changed = copy.deepcopy({**config})
    for key, value in options.items():
        _place(changed, key.split("."), copy.deepcopy(value))
    return without_stage_options(changed, options)


def whole_names(config: Config, named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options by their whole names, such as `model.attention` for `attention`.

    Raises:
        UserError: If the configuration has no option of that name, or several.
    """
    sections = ("model", "data", "trainer", "checkpoint", "non_finite")
    every = [*config, *(f"{section}.{name}" for section in sections for name in _inside(config[section]))]
    found = dict[str, Any]()
    for name, value in named.items():
        fitting = [option for option in every if option.rpartition(".")[2] == name]
        if not fitting:
            near = did_you_mean(name, [option.rpartition(".")[2] for option in every])
            raise UserError(f"the configuration has no option '{name}'.{near}")
        if len(fitting) > 1:
            raise UserError(f"'{name}' may be {' or '.join(fitting)}: give a mapping, {{'{fitting[0]}': {value!r}}}")
        found[fitting[0]] = value
    return found


def stage_config(config: Mapping[str, Any], stage: Mapping[str, Any]) -> Config:
    """Returns the configuration of one of the `stages`."""
    return replace_options({**config, "stages": None}, stage)


def without_stage_options(config: Config, names: Iterable[str]) -> Config:
    """Returns a configuration whose stages set none of these options or parts of them."""
    taken = tuple(f"{name.removesuffix('+')}." for name in names)
    stages = config.get("stages")
    kept = [{name: stage[name] for name in stage if not f"{name}.".startswith(taken)} for stage in stages or []]
    return {**config, "stages": kept} if stages else config


def _place(config: Config, path: Sequence[str], value: Any) -> None:
    *outer, last = path
    for part in outer:
        config = _inside(config)
        if not isinstance(config.get(part), dict):
            name = "class_path" if outer[0] == "trainer" else UNNAMED.get(part, "name")
            config[part] = {} if config.get(part) is None else {name: config[part]}
        config = config[part]
    config = _inside(config)
    if last.endswith("+"):
        last = last.removesuffix("+")
        value = [*(config.get(last) or []), *(value if isinstance(value, list) else [value])]
    config[last] = value


def _inside(config: Config) -> Config:
    """Returns the mapping with the options of a part, `init_args` where it is a class."""
    inside: Config = config.setdefault("init_args", {}) if "class_path" in config else config
    return inside
