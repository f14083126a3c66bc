"""Writes a trained network to a folder in timm's layout, local or on the hub, with linvit's description and a card."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from huggingface_hub import HfApi, get_token
from timm.models import get_model_args, get_model_input_config
from torch import nn

from linvit.errors import UserError
from linvit.inference.description import ModelDescription, build_task, read_trained, write_trained
from linvit.io.files import new_folder, write_text
from linvit.io.plain_text import markdown_code, markdown_text
from linvit.registry import Registry, attentions, backbones, heads
from linvit.runs.folder import EVALUATED, RunFolder, mapping
from linvit.weights.read import HUB, HUB_FILES, REPOSITORY

TASKS = {
    "ClassificationTask": ("image-classification", "one class per image"),
    "SegmentationTask": ("image-segmentation", "a class per pixel"),
    "DetectionTask": ("object-detection", "boxes of objects"),
}
"""Name of the task on the hub, and a description, by the class of the task."""
OF_TRAINER = (
    *("max_epochs", "max_steps", "max_time", "limit_train_batches", "overfit_batches", "precision"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "sync_batchnorm"),
)
PATH, SECRET = "(a path)", "(not shown)"
"""Replacement in a card for local paths and possible passwords."""
NAMED = re.compile(r"(hf-hub:|hub:)?[^/\\~]*|(hf-hub:|hub:)[\w.-]+/[\w.-]+(@[\w.-]+)?")  # texts that are not paths
PRIVATE = re.compile(r"token|secret|password|credential|api_?key", re.IGNORECASE)
MOST_NAMES = 20  # of classes
ONLY_FOR_TIMM = """The network alone, in timm and in transformers:

```python
import linvit.backbones  # makes its names known
import timm
from transformers import AutoModelForImageClassification

network = timm.create_model("{timm}", pretrained=True)
network = AutoModelForImageClassification.from_pretrained("{name}")
```

"""
TEMPLATE = """---
{head}---

# {title}

{what}

## How to load it

```python
import linvit

model = linvit.load("{linvit}")
model("photo.jpg")
```

{timm}`linvit.load` prepares images as they were prepared in training: {preprocessing}.

## Scores

{scores}

## Data

{data}

## Training

With linvit {version}, by `linvit fit --config config.yaml`, where config.yaml is

```yaml
{config}```

## Licence

The weights: {licence}.

## Citation

{papers}
"""


def public(value: Any) -> Any:
    """Returns a part of a configuration without values specific to the machine: paths, addresses and passwords."""
    if isinstance(value, Mapping):
        return {str(key): SECRET if item and PRIVATE.search(str(key)) else public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    if isinstance(value, str):
        return SECRET if re.search(r"\bhf_\w{20,}", value) else value if NAMED.fullmatch(value) else PATH
    return value


def write_card(
    description: ModelDescription, run: RunFolder, licence: str, place: Mapping[str, str], in_timm: bool
) -> str:
    """Returns the card as Markdown with the hub's header; `place` has the names for linvit, timm and transformers."""
    task = description.task.rpartition(":")[2].rpartition(".")[2]
    pipeline, what = TASKS.get(task, ("", task))
    specs = [(registry, description.options.get(registry.kind)) for registry in (attentions, heads, backbones)]
    names = {registry: _names(spec) for registry, spec in specs}
    model = description.options.get("backbone")
    own = model.get("model") if isinstance(model, Mapping) else None  # of timm
    parts = filter(None, (", ".join(names[attentions]), ", ".join(names[heads])))
    title = " with ".join(filter(None, (str(own or [*names[backbones], task][0]), " and ".join(parts))))
    head = {
        "license": licence,
        "library_name": "timm" if in_timm else "linvit",
        **({"pipeline_tag": pipeline} if pipeline else {}),
        "tags": ["linvit", "linear-attention", *(["timm", "transformers"] if in_timm else []), *names[attentions]],
    }
    classes = description.class_names
    shown = ", ".join(map(markdown_code, classes[:MOST_NAMES])) + (", ..." if len(classes) > MOST_NAMES else "")
    data, trainer = public(mapping(run.config.get("data"))), mapping(run.config.get("trainer"))
    config = {
        "seed_everything": run.config.get("seed_everything"),
        "trainer": {name: value for name, value in trainer.items() if name in OF_TRAINER},
        "model": public(run.config.get("model")),
        "data": data,
    }
    origin = mapping(data.get("init_args")).get("source")
    origin = origin if origin in (None, PATH) else markdown_code(str(origin))
    taught = " It was trained beside a teacher, as a copy with another attention." * bool(run.model.get("teacher"))
    best, scores = run.best_score(run.score_tag()), ""
    if best is not None and mapping(run.config.get("checkpoint")).get("monitor") == EVALUATED:
        where = f"on the validation split ({run.score_tag()}), after {best.step + 1} steps"
        scores = f"{best.value:.4f} {where}, the run's best."
    images = (description.preprocessing or {}).items()
    prepared = ", ".join(f"{name} {value}" for name, value in images if value is not None)
    return TEMPLATE.format(
        head=yaml.safe_dump(head, sort_keys=False),
        title=markdown_text(title),
        what=f"It predicts {what}, of {len(classes)} classes: {shown}.{taught}",
        linvit=place["linvit"],
        timm=ONLY_FOR_TIMM.format(**place) if in_timm else "",
        preprocessing=prepared or "its file has no description of the preprocessing",
        scores=scores,
        data="Images of a folder or a table." if origin in (None, PATH) else f"Trained and scored on {origin}.",
        version=description.version,
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        licence=licence,
        papers="\n".join(f"- {paper}" for paper in _papers(names)) or "No paper is known of its parts.",
    )


def _names(spec: Any) -> list[str]:
    every = spec if isinstance(spec, list | tuple) else [spec]
    found = (one.get("name") if isinstance(one, Mapping) else one for one in every)
    return list(dict.fromkeys(str(name) for name in found if name is not None))


def _papers(names: Mapping[Registry, Sequence[str]]) -> list[str]:
    """Returns author, year and title of the papers of mechanisms, heads and backbones, if their modules have them."""
    found = [
        (name, registry.describe(name).citation)
        for registry, each in names.items()
        for name in each
        if name in registry.entries()
    ]
    return list(dict.fromkeys(f"{name}: {paper}" for name, paper in found if paper))


WEIGHTS, CONFIG, CARD = HUB_FILES[0], "config.json", "README.md"
# timm's notes on the initial weights of a model
OF_OTHER_WEIGHTS = (
    *("url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "tag", "label_offset"),
    *("test_input_size", "test_crop_pct"),
)
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def check_licence(licence: str | None) -> str:
    """Returns the licence if it has the hub's form; raises a `UserError` otherwise."""
    if licence is None or not LICENCE.fullmatch(licence):
        raise UserError(
            f"say under which licence the weights may be used, --license=apache-2.0, mit ...; got {licence!r}"
        )
    return licence


def write_folder(run: RunFolder, folder: Path, licence: str, place: Mapping[str, str]) -> None:
    """Writes weights, configuration and card of a finished run's best checkpoint into a new or empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"'{folder}' exists and is not an empty folder: name another one, or empty it first")
    description, state = read_trained(run.folder)
    network = build_task(description, state, run.folder).network
    for_timm = timm_config(network, description, licence)
    config = {**for_timm, "linvit": asdict(description)}
    card = write_card(description, run, licence, place, bool(for_timm))
    with new_folder(folder) as prepared:
        write_trained(prepared / WEIGHTS, network, description)
        write_text(prepared / CONFIG, json.dumps(config, indent=2))
        write_text(prepared / CARD, card)


def timm_config(network: nn.Module, description: ModelDescription, licence: str) -> dict[str, Any]:
    """Returns the content of timm's config.json for a network; empty if timm's registry cannot build it."""
    own = getattr(network, "pretrained_cfg", None)
    if own is None:
        return {}
    config = {name: value for name, value in own.items() if value is not None and name not in OF_OTHER_WEIGHTS}
    images = description.preprocessing or {}
    channels, *size = get_model_input_config(network)["input_size"]
    config |= {name: images[name] for name in ("mean", "std", "crop_pct", "crop_mode") if name in images}
    config |= {"input_size": [channels, *(images.get("size") or size)], "num_classes": network.num_classes}
    config |= {"interpolation": "bicubic", "license": licence, "custom_load": False}
    return {
        "architecture": config.pop("architecture"),
        "num_classes": network.num_classes,  # not in model_args: transformers reads only this
        "num_features": network.num_features,
        "label_names": description.class_names,
        "model_args": {name: value for name, value in get_model_args(network).items() if name != "num_classes"},
        "pretrained_cfg": config,
    }


def push(run: RunFolder, repository: str, licence: str) -> str:
    """Uploads a finished run to a repository of the hub, which is created if necessary; returns its address."""
    if not REPOSITORY.fullmatch(repository):
        raise UserError(f"a repository of the hub is called owner/name; got '{repository}'")
    address = f"{HUB}{repository}"
    api = HfApi(library_name="linvit", library_version=version("linvit"))
    if not get_token():
        raise UserError(
            "the hub asks for a token to write: log in by `hf auth login`, or set HF_TOKEN; or use --to DIR"
        )
    with TemporaryDirectory(prefix="linvit-") as temporary:
        folder = Path(temporary, "model")
        write_folder(run, folder, licence, {"linvit": address, "timm": address, "name": repository})
        try:
            api.create_repo(repository, exist_ok=True)
            done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with linvit")
        except Exception as error:  # of several libraries
            reason = " ".join(str(error).split())[:300].replace(str(get_token()), "(token)")
            raise UserError(f"'{repository}' was not uploaded: {type(error).__name__}: {reason}") from error
    return str(done.commit_url)
