"""The hybrid of a run with a teacher: what `linvit linearize --budget` searches."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from linvit.backbones.stage import specs_per_layer
from linvit.errors import UserError
from linvit.experiments.hybrids.blocks import BATCHES, attention_layers, digest
from linvit.experiments.hybrids.costs import inputs_of
from linvit.experiments.hybrids.search import HybridSearch, search_hybrid
from linvit.experiments.page import Page
from linvit.image_size import image_size
from linvit.io.files import write_text
from linvit.io.reading import read_text
from linvit.linearization.student import linearize
from linvit.registry import Spec
from linvit.registry.layouts import is_layout, window_side
from linvit.runs.folder import run_name
from linvit.runs.resolve import root_of
from linvit.runs.run import Run
from linvit.tasks.teacher import fingerprint, given_options, stacked, teacher_network


def check_attention(attention: Any) -> None:
    """Raises a `UserError` unless an option `--model.attention` is one attention, which a search can give to blocks."""
    if attention is None or isinstance(attention, list) or is_layout(attention):
        raise UserError(
            f"--budget searches among attentions; got --model.attention={json.dumps(attention)}. Write --choices "
            f"'[{{name: window, window_size: 7}}, hedgehog]', or one name as --model.attention"
        )


def find_hybrid(
    run: Run, budget: str, choices: Sequence[Spec] | None, steps: int
) -> tuple[list[Spec | None], HybridSearch | None]:
    """The list for `--model.attention` of a run, and on rank 0 the search, whose files are in a folder beside the runs.

    Other ranks wait for the list.
    """
    task, attention = run.task, run.task.hparams["attention"]
    assert task.teacher is not None
    cuda = torch.cuda.is_available() and run.config["trainer"]["accelerator"] != "cpu"
    teacher = teacher_network(task, task.teacher).to("cuda" if cuda else "cpu")
    img_size, seed = image_size(task.hparams["img_size"]), run.config["seed_everything"]
    names = attention_layers(linearize(teacher, attention, img_size))
    if choices is None:
        image = torch.zeros(1, task.hparams["in_chans"], *img_size, device=next(teacher.parameters()).device)
        tokens = inputs_of(teacher.eval(), names[:1], image)[0][1][0].shape[1]
        side = math.isqrt(tokens)
        window = {"name": "window", "window_size": window_side(side, min(14, math.ceil(side / 2)))}
        choices = [attention] if budget.startswith("softmax") else [window, attention]
    key = [fingerprint(teacher), img_size, seed, steps, run.config["data"]]
    folder = root_of(run.config) / run_name(run.config["config"]) / f"search-{digest(key)}"
    path = folder / f"found-{digest([budget, choices])}.json"
    while not path.exists() and rank_zero_only.rank:  # type: ignore[attr-defined]
        time.sleep(1)
    if rank_zero_only.rank:  # type: ignore[attr-defined]
        return list(json.loads(read_text(path))), None
    run.data.setup("fit")
    images = _Images(run.data, run.data.train_dataloader)
    held_out = list(islice(_Images(run.data, run.data.val_dataloader), BATCHES))
    options: Any = {"budget": budget, "held_out": held_out, "steps": steps, "seed": seed, "folder": folder}
    found = search_hybrid(teacher, choices, images, **options, say=partial(print, flush=True))
    theirs: Any = given_options(task.teacher).get("attention")
    inner = getattr(teacher, "backbone", teacher)
    kept = specs_per_layer(theirs, inner, [name.removeprefix("backbone.") for name in names])
    specs = [theirs if own is None else own for own, theirs in zip(found.attention, kept, strict=True)]
    page = Page(f"search: {budget}")
    found.add_to(page)
    page.write(folder / "search.html")
    print(f"what was measured: {folder / 'search.html'}", flush=True)
    write_text(path, json.dumps(specs))
    return specs, found


class _Images:
    """The images of a data module's batches, the same each time."""

    def __init__(self, data: Any, loader: Callable[[], Iterable[Any]]) -> None:
        self.data, self.loader = data, loader

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.loader():
            self.data.finish(batch)
            yield stacked(batch["image"])
