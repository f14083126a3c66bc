"""Description of a trained network in its file, in plain values, and the network built from it."""

import json
import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from linvit import tasks
from linvit.errors import UserError, quote_first
from linvit.finite import not_finite
from linvit.io.files import CHECKPOINTS, write_bytes
from linvit.io.reading import check_regular
from linvit.registry.entries import known_class, restrict_imports_to
from linvit.runs.checkpoint import check_same_model, checkpoint_in, read_checkpoint
from linvit.runs.folder import RunFolder, best_checkpoints, newest
from linvit.tasks.base import Task
from linvit.tasks.execution import OF_TRAINING
from linvit.tasks.pretrained import skip_pretrained
from linvit.tasks.safe_loading import DESCRIPTION, are_category_ids, not_plain
from linvit.weights import torch_file
from linvit.weights.read import AVERAGE, HUB, HUB_FILES, TRAINED, WRITTEN_BY, download, model_named

Weights = Literal["raw", "ema"]


@dataclass(frozen=True)
class ModelDescription:
    """Description of a trained network, in plain values that JSON can store."""

    version: str  # version of linvit that trained it
    task: str  # class of its task: "linvit.tasks.classification:ClassificationTask"
    options: dict[str, Any]  # arguments of the task that determine network and predictions: `backbone`, `window` ...
    weights: Weights = "raw"  # kind of a run's weights; "ema" is their moving average
    preprocessing: dict[str, Any] | None = None  # arguments of `Preprocessing`; None if unknown
    category_ids: list[int] | None = None  # COCO's ids of the classes; None for other tasks and linvit 0.2.0

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, or their numbers."""
        return list(self.options.get("class_names") or map(str, range(self.options.get("num_classes") or 0)))

    @classmethod
    def from_dict(cls, content: Any, source: object) -> "ModelDescription":
        """Reads a description from the content of the file `source`; raises a `UserError` if it is something else."""
        kinds: dict[str, Any] = {
            "version": str,
            "task": str,
            "options": dict,
            "weights": str,
            "preprocessing": dict | None,
        }
        kinds |= {"category_ids": list | None}
        wrong = None if isinstance(content, dict) else f"it is a {type(content).__name__}"
        for name, kind in kinds.items() if wrong is None else ():
            if not isinstance(content.get(name), kind):
                wrong = f"{name} is {content.get(name)!r:.80}"
        if wrong is None and (reason := not_plain(content["options"]) or not_plain(content["preprocessing"])):
            wrong = f"it holds {reason}"
        elif wrong is None and (names := content["options"].get("class_names")):
            texts = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
            if not texts or len(names) != content["options"].get("num_classes"):
                wrong = f"the names of its classes are {names!r:.80}"
        ids = content.get("category_ids") if wrong is None else None
        if ids is not None and not are_category_ids(ids, content["options"].get("num_classes")):
            wrong = f"the ids of its classes are {ids!r:.80}"
        if wrong is not None:
            raise UserError(f"'{source}' does not describe a trained network of linvit: {wrong}")
        return cls(**{name: content.get(name) for name in kinds})


def read_trained(source: str | Path, weights: Weights | None = None) -> tuple[ModelDescription, dict[str, Tensor]]:
    """Returns the description of a trained network, and its weights by name; nothing is executed."""
    path = download(source) if isinstance(source, str) and source.startswith(HUB) else Path(source)
    if (path / HUB_FILES[0]).is_file():
        path /= HUB_FILES[0]
    if path.is_dir():
        run = run_in(path)
        weights = weights or run.model.get("predict_with", "raw")
        path = checkpoint_in(run.folder, best_checkpoints(weights), "source")
    return _of_safetensors(path, weights) if path.suffix == ".safetensors" else _of_checkpoint(path, weights)


def run_in(folder: Path) -> RunFolder:
    """Returns the run whose folder this is, or the newest of several in it."""
    run = RunFolder(folder) if (folder / CHECKPOINTS).is_dir() else newest(folder)
    if run is None:
        raise UserError(f"'{folder}' is not the folder of a run: it has no {CHECKPOINTS}, nor runs version_N in it")
    return run


def _of_safetensors(path: Path, weights: Weights | None) -> tuple[ModelDescription, dict[str, Tensor]]:
    try:
        check_regular(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        content = json.loads(metadata["description"]) if "description" in metadata else None
    except FileNotFoundError as error:
        raise UserError(f"the file '{path}' does not exist") from error
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise torch_file.broken(path, error) from error
    if content is None:
        raise UserError(
            f"'{path}' contains only weights: give the folder of the run, or linvit.load_pretrained(network, '{path}')"
        )
    description = ModelDescription.from_dict(content, path)
    if weights not in (None, description.weights):
        raise UserError(f"'{path}' has only the {description.weights} weights; for the {weights} ones, name the run")
    return description, state


def _of_checkpoint(path: Path, weights: Weights | None) -> tuple[ModelDescription, dict[str, Tensor]]:
    content = read_checkpoint(path)
    given, known = content["hyper_parameters"], content.get(DESCRIPTION)
    averaged = bool(content.get("ema_updates"))
    if weights == "ema" and not averaged:
        raise UserError(f"checkpoint '{path}' has no moving average of the weights: use the raw ones")
    if weights is None:
        weights = "ema" if averaged and given.get("predict_with") == "ema" else "raw"
    options = {name: value for name, value in given.items() if name not in OF_TRAINING}
    if not isinstance(known, Mapping):
        raise UserError(f"'{path}' does not describe a trained network of linvit: it holds a {type(known).__name__}")
    prefix = AVERAGE if weights == "ema" else TRAINED
    state = {n.removeprefix(prefix): tensor for n, tensor in content["state_dict"].items() if n.startswith(prefix)}
    return ModelDescription.from_dict({**known, "options": options, "weights": weights}, path), state


def build_task(
    description: ModelDescription,
    state: Mapping[str, Tensor],
    source: str | Path,
    allow: Collection[str] = (),
    **options: Any,
) -> Task:
    """Returns the task with its network and the weights, in evaluation mode; `task.network` is plain torch.

    Only registered classes and those in `allow` are imported. `options` are options that do not change the network.
    """
    try:
        found = task_class(description.task, allow)
        with skip_pretrained(), restrict_imports_to(list(allow)):
            task = found(**{**description.options, **options})
        check_same_model(source, dict(state), task.network, model_named(description.options))
        if bad := not_finite(task.network, {"state_dict": state}):
            raise UserError(f"it has non-finite weights: {quote_first(bad, 3)}")
        task.network.load_state_dict(state)
    except Exception as error:  # options of any content
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".partition("\n")[0]
        if description.version != version("linvit"):
            reason += f"; linvit {description.version} wrote it, and this is {version('linvit')}. "
            reason += "linvit.load_pretrained(network, FILE) takes its weights alone"
        raise UserError(f"'{source}' cannot be used: {reason}") from error
    return task.eval().requires_grad_(False)


def task_class(name: str, allow: Collection[str] = ()) -> type[Task]:
    """Returns the class of a task by its path: linvit's own, an already imported one, or an allowed one."""
    if name.replace(":", ".") in {path.replace(":", ".") for path in allow}:
        pkgutil.resolve_name(name)
    found: type[Task] | None = known_class(name, Task, tasks)
    if found is not None:
        return found
    raise UserError(
        f"the task '{name}' is not linvit's, and to import it would run its code. If you trust it, import its module "
        f"first, or name it: linvit.load(..., allow=['{name}']), or --allow={name} on the command line"
    )


def write_trained(path: str | Path, network: nn.Module, description: ModelDescription) -> None:
    """Writes a network's weights with its description as a safetensors file, which `read_trained` reads."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    names = ("backbone", "attention", "head", "img_size")
    options = {name: description.options[name] for name in names if name in description.options}
    metadata = {WRITTEN_BY: description.version, "options": json.dumps(options)}  # read by load_pretrained
    write_bytes(Path(path), save(state, metadata | {"description": json.dumps(asdict(description))}))
