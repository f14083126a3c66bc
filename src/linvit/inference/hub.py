"""A trained network as a folder in timm's layout, with linvit's description and a card; here, or on the hub."""

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, get_token
from timm.models import get_model_args, get_model_input_config
from torch import nn

from linvit.errors import UserError
from linvit.inference.card import Place, write_card
from linvit.inference.description import ModelDescription, build_network, read_trained, write_trained
from linvit.runs.folder import CHECKPOINTS, RunFolder, newest
from linvit.weights.read import HUB, HUB_FILES, REPOSITORY

WEIGHTS, CONFIG, CARD = HUB_FILES[0], "config.json", "README.md"
OF_OTHER_WEIGHTS = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "tag", "label_offset")
"""What timm notes of weights that a model began with."""
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def finished_run(source: Path) -> RunFolder:
    """The run in a folder, or the newest of several in it; a `UserError` if there is none, or it has not ended."""
    run = RunFolder(source) if (source / CHECKPOINTS).is_dir() else newest(source)
    if run is None:
        raise UserError(f"'{source}' is not the folder of a run: it has no {CHECKPOINTS}, nor runs version_N in it")
    if not run.complete:
        raise UserError(f"the run '{run.folder}' is not finished: {run.progress}. Continue it with\n  {run.command}")
    return run


def check_licence(licence: str | None) -> str:
    """The licence, if it is given in the hub's form."""
    if licence is None or not LICENCE.fullmatch(licence):
        raise UserError(
            f"say under which licence the weights may be used, by the hub's name of it: --license=apache-2.0, mit, "
            f"cc-by-4.0, cc-by-nc-4.0, other ...; got {licence!r}. The data may allow less than you want to"
        )
    return licence


def write_folder(run: RunFolder, folder: Path, licence: str, place: Place, table: Sequence[Sequence[str]] = ()) -> None:
    """Writes weights, configuration and card of a finished run's best checkpoint into a folder, which is new or empty.

    `place` is what the card tells to load, `table` titles and row of the run in the table of a comparison.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"'{folder}' exists and is not an empty folder: name another one, or empty it first")
    description, state = read_trained(run.folder)
    network = build_network(description, state, run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_trained(folder / WEIGHTS, network, description)
    for_timm = timm_config(network, description, licence)
    config = {**for_timm, "linvit": description.as_dict()}
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / CARD).write_text(write_card(description, run, licence, place, bool(for_timm), table), encoding="utf-8")


def timm_config(network: nn.Module, description: ModelDescription, licence: str) -> dict[str, Any]:
    """What timm's config.json says of a network; empty for one that timm's registry cannot build.

    `num_classes` stands beside the arguments of the model, not among them: transformers takes it from there alone.
    """
    own = getattr(network, "pretrained_cfg", None)
    if own is None:
        return {}
    config = {name: value for name, value in own.items() if value is not None and name not in OF_OTHER_WEIGHTS}
    images = description.preprocessing or {}
    channels, *size = get_model_input_config(network)["input_size"]
    config |= {name: images[name] for name in ("mean", "std", "crop_pct", "crop_mode") if name in images}
    config |= {
        "input_size": [channels, *(images.get("size") or size)],
        "num_classes": network.num_classes,
        "license": licence,
        "custom_load": False,
    }
    arguments = {name: value for name, value in get_model_args(network).items() if name != "num_classes"}
    return {
        "architecture": config.pop("architecture"),
        "num_classes": network.num_classes,
        "num_features": network.num_features,
        "label_names": description.class_names,
        "model_args": arguments,
        "pretrained_cfg": config,
    }


def push(run: RunFolder, repository: str, licence: str, table: Sequence[Sequence[str]] = ()) -> str:
    """Uploads a finished run to a repository of the hub, which is made if there is none; returns the address."""
    if not REPOSITORY.fullmatch(repository):
        raise UserError(f"a repository of the hub is called owner/name; got '{repository}'")
    api = HfApi(library_name="linvit", library_version=version("linvit"))
    if not get_token():
        raise UserError(
            "the hub asks for a token to write: log in by `hf auth login`, or set HF_TOKEN; or use --to DIR"
        )
    with TemporaryDirectory(prefix="linvit-") as temporary:
        folder = Path(temporary, "model")
        write_folder(run, folder, licence, Place(f"{HUB}{repository}", f"{HUB}{repository}", repository), table)
        try:
            api.create_repo(repository, exist_ok=True)
            done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with linvit")
        except Exception as error:  # of several libraries
            reason = " ".join(str(error).split())[:300].replace(str(get_token()), "(token)")
            raise UserError(f"'{repository}' was not uploaded: {type(error).__name__}: {reason}") from error
    return str(done.commit_url)
