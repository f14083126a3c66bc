"""Complete configurations of the variants of a grid, read by the parser of `linvit fit` and checked by building."""

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from linvit import yaml_text
from linvit.cli.training.command_line import command_line
from linvit.data.base import ImageData
from linvit.errors import UserError, find_user_error
from linvit.experiments.compare.grid import Sweep, place
from linvit.runs.cli import LinvitCLI
from linvit.runs.parser import Parser, build_task
from linvit.tasks.base import SET_BY_DATA
from linvit.tasks.pretrained import skip_pretrained

Config = dict[str, Any]


class _Read(BaseException):
    """The command line is read; nothing is built."""

    def __init__(self, cli: "_Reader") -> None:
        super().__init__()
        self.cli = cli


class _Reader(LinvitCLI):
    """The command line of `linvit fit`, whose parser can be used again."""

    built = False

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses; stops there."""
        super().parse_arguments(parser, args)
        if not self.built:
            self.built = True
            raise _Read(self)

    def read(self, argv: list[str]) -> Config:
        """The complete configuration that arguments of `linvit fit` amount to."""
        self.parse_arguments(self.parser, ["fit", *argv])
        return cast(
            "Config", yaml_text.load(self.parser.dump(self.config, skip_unset=False), "the configuration")["fit"]
        )

    def read_config(self, config: Config) -> Config:
        """The same of a configuration in memory."""
        with tempfile.TemporaryDirectory(prefix="linvit-compare-") as folder:
            path = Path(folder, "run.yaml")
            path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            return self.read([f"--config={path}"])


class Resolver:
    """Reads the variants of grids that start from the same configuration.

    Args:
        configs: Files or names, of which a later one wins.

    Raises:
        UserError: If one of them is wrong.
    """

    def __init__(self, configs: tuple[str, ...]) -> None:
        arguments = [part for config in configs for part in ("--config", config)]
        try:
            command_line(_Reader, ["fit", *arguments])
        except _Read as done:
            self._reader = done.cli
        self._base = self._reader.read(arguments)
        self._data: dict[str, dict[str, Any]] = {}  # facts of the data, by its configuration

    def resolve(self, grid: Sweep) -> dict[str, Config]:
        """The complete configuration of each variant; the model of each is built, without memory for its weights.

        Raises:
            UserError: If an option does not exist or a value is not allowed, or if two variants are the same. It names
                the variant.
        """
        base = copy.deepcopy(self._base)
        for key, value in grid.settings.items():
            place(base, key, value)
        found: dict[str, Config] = {}
        for name, settings in grid.variants.items():
            config = copy.deepcopy(base)
            for key, value in settings.items():
                place(config, key, value)
            try:
                resolved = self._reader.read_config(config)
                self._build(self._reader.settings)
            except UserError as error:
                given = ", ".join(f"{key}={value}" for key, value in settings.items())
                raise UserError(f"the variant '{name}' ({given}) cannot be run: {error}") from error
            for other, before in found.items():
                if before == resolved:
                    raise UserError(f"the variants '{other}' and '{name}' are the same run. Leave one of them out")
            found[name] = resolved
        return found

    def _build(self, settings: Namespace) -> None:
        """Builds the task on the meta device, where no weights are stored, or where it cannot be built, on the CPU."""
        facts = {fact: value for fact, value in self._facts(settings.data).items() if value is not None}
        with skip_pretrained():
            try:
                with torch.device("meta"):
                    build_task(settings.model, **facts)
            except UserError:
                raise
            except Exception:
                build_task(settings.model, **facts)

    def _facts(self, data: Namespace) -> Mapping[str, Any]:
        """What the data tells the model; the data is made once."""
        key = repr(data)
        if key not in self._data:
            made = _data(data)
            self._data[key] = {fact: getattr(made, fact) for fact in SET_BY_DATA}
        return self._data[key]


def _data(settings: Namespace) -> ImageData:
    """The data module that the `data` section of a configuration describes."""
    parser = Parser()
    parser.add_subclass_arguments(ImageData, "data")
    try:
        data: ImageData = parser.instantiate(Namespace(data=settings)).data  # type: ignore[no-untyped-call]
        return data
    except Exception as error:
        raise find_user_error(error) or error from error
