"""The card of a trained network: what it is, how it was trained, what it scores, and how to load it."""

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import yaml

from linvit import source
from linvit.inference.description import ModelDescription
from linvit.plain_text import markdown_table, printable
from linvit.registry import Registry, attentions, backbones, heads
from linvit.runs.folder import EVALUATED, RunFolder

TASKS = {
    "ClassificationTask": ("image-classification", "one class per image"),
    "SegmentationTask": ("image-segmentation", "a class per pixel"),
    "DetectionTask": ("object-detection", "boxes of objects"),
}
"""By the class of the task: the hub's name of what it does, and ours."""
OF_TRAINER = (
    *("max_epochs", "max_steps", "max_time", "limit_train_batches", "overfit_batches", "precision"),
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "sync_batchnorm"),
)
PATH, SECRET = "(a path)", "(not shown)"
"""What stands in a card where the configuration has a place on the machine, or what may be a password."""
NAMED = re.compile(r"(hf-hub:|hub:)?[^/\\~]*|(hf-hub:|hub:)[\w.-]+/[\w.-]+(@[\w.-]+)?")  # texts that are not paths
PRIVATE = re.compile(r"token|secret|password|credential|api_?key", re.IGNORECASE)
MOST_NAMES = 20  # of classes
ONLY_FOR_TIMM = """The network alone, in timm and in transformers:

```python
import linvit.backbones  # makes its names known
import timm

network = timm.create_model("{timm}", pretrained=True)
```

```python
import linvit.backbones
from transformers import AutoModelForImageClassification

network = AutoModelForImageClassification.from_pretrained("{name}")
```

"""
CARD = """---
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

{licence}

## Citation

{papers}
"""


class Place(NamedTuple):
    """What `linvit.load`, `timm.create_model` and transformers take to load a network."""

    linvit: str
    timm: str
    name: str


def public(value: Any) -> Any:
    """A part of a configuration without what belongs to the machine: paths, addresses and passwords."""
    if isinstance(value, Mapping):
        return {str(key): SECRET if item and PRIVATE.search(str(key)) else public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public(item) for item in value]
    if isinstance(value, str):
        return SECRET if re.search(r"\bhf_\w{20,}", value) else value if NAMED.fullmatch(value) else PATH
    return value


def write_card(
    description: ModelDescription,
    run: RunFolder,
    licence: str,
    place: Place,
    in_timm: bool,
    table: Sequence[Sequence[str]] = (),
) -> str:
    """The card as Markdown, with the hub's header; `table` has titles and row of the run in a comparison."""
    task = description.task.rpartition(":")[2].rpartition(".")[2]
    pipeline, what = TASKS.get(task, ("", task))
    specs = [(registry, description.options.get(registry.kind)) for registry in (attentions, heads, backbones)]
    names = {registry: _names(spec) for registry, spec in specs}
    model = description.options.get("backbone")
    named = [*([model["model"]] if isinstance(model, Mapping) and "model" in model else []), *names[backbones], task]
    parts = [part for part in (", ".join(names[attentions]), ", ".join(names[heads])) if part]
    title = printable(" with ".join([str(named[0]), *[" and ".join(parts)] * bool(parts)]), lines=False)
    head = {
        "license": licence,
        "library_name": "timm" if in_timm else "linvit",
        **({"pipeline_tag": pipeline} if pipeline else {}),
        "tags": ["linvit", "linear-attention", *(["timm", "transformers"] if in_timm else []), *names[attentions]],
    }
    classes = [printable(name, lines=False) for name in description.class_names]
    shown = ", ".join(f"`{name}`" for name in classes[:MOST_NAMES]) + (", ..." if len(classes) > MOST_NAMES else "")
    data = public(run.config.get("data") or {})
    config = {
        "seed_everything": run.config.get("seed_everything"),
        "trainer": {name: value for name, value in (run.config.get("trainer") or {}).items() if name in OF_TRAINER},
        "model": public(run.config.get("model")),
        "data": data,
    }
    origin = (data.get("init_args") or {}).get("source")
    learned = " It was trained beside a teacher, as a copy of it with another attention." * bool(
        run.model.get("teacher")
    )
    images = (description.preprocessing or {}).items()
    return CARD.format(
        head=yaml.safe_dump(head, sort_keys=False),
        title=title,
        what=f"It predicts {what}, of {len(classes)} classes: {shown}.{learned}",
        linvit=place.linvit,
        timm=ONLY_FOR_TIMM.format(**place._asdict()) if in_timm else "",
        preprocessing=", ".join(f"{name} {value}" for name, value in images if value is not None)
        or "its file does not say how",
        scores=_scores(run, table),
        data=f"Trained and scored on `{origin}`." if origin not in (None, PATH) else "Images of a folder or a table.",
        version=description.version,
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        licence=f"The weights: {licence}.",
        papers="\n".join(f"- {paper}" for paper in _papers(names)) or "No paper is known of its parts.",
    )


def _names(spec: Any) -> list[str]:
    """The names in a spec, or in a list of them."""
    every = spec if isinstance(spec, list | tuple) else [spec]
    found = (one.get("name") if isinstance(one, Mapping) else one for one in every)
    return list(dict.fromkeys(str(name) for name in found if name is not None))


def _scores(run: RunFolder, table: Sequence[Sequence[str]]) -> str:
    """What the weights scored, and the row of their run in a comparison."""
    curve = run.curves.get(run.score_tag())
    found = []
    if curve and (run.config.get("checkpoint") or {}).get("monitor") == EVALUATED:
        step, score = max(curve, key=itemgetter(1))
        found.append(
            f"{score:.4f} on the validation split ({run.score_tag()}), after {step + 1} steps, the run's best."
        )
    if table:
        found.append(
            "In a comparison of `linvit compare`, at the end of the runs, mean ± standard deviation over seeds:"
        )
        found.append(markdown_table([list(row) for row in table]))
    return "\n\n".join(found)


def _papers(names: Mapping[Registry, Sequence[str]]) -> list[str]:
    """Author, year and title of the papers of mechanisms, heads and backbones, as far as their modules name them."""
    found: dict[str, None] = {}
    for registry, each in names.items():
        for name in each:
            entries = registry.entries().get(name)
            if entries and (paper := source.citation(entries[0].target)):
                found.setdefault(f"{name}: {paper}", None)
    return list(found)
