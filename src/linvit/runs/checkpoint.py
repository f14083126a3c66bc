"""Reads and checks checkpoints, and finds them for `--resume=auto`. A checkpoint decides the model."""

import pkgutil
import shlex
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from linvit.callbacks.exact_resume import WITHIN_STEP
from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.errors import UserError, quote_first
from linvit.finite import not_finite
from linvit.io.files import CHECKPOINTS, LAST
from linvit.io.plain_text import in_shell, shown
from linvit.registry.entries import restrict_imports_to
from linvit.registry.signatures import equal_options
from linvit.runs import yaml_text
from linvit.runs.folder import (
    CONFIG,
    RunFolder,
    flat,
    run_config,
    run_name,
    run_of_checkpoint,
    run_of_config,
    versions,
)
from linvit.tasks.base import SET_BY_DATA
from linvit.tasks.execution import SET_BY_RUN
from linvit.tasks.pretrained import skip_pretrained
from linvit.tasks.safe_loading import DESCRIPTION, check_content, epochs_done, stopped_early, within_validation
from linvit.weights import torch_file
from linvit.weights.read import model_named

if TYPE_CHECKING:  # linvit.load needs neither
    from linvit.data.base import ImageData
    from linvit.runs.parser import Config


class Checkpoint:
    """Checkpoint of a linvit run to resume or score."""

    def __init__(self, path: str | Path, resumed: bool = False) -> None:
        content = read_checkpoint(path, resumed)
        self.path = path
        self.step: int = content.get("global_step", 0)
        self.epochs = epochs_done(content)
        self.stopped_early = stopped_early(content)
        self.within_validation = within_validation(content)
        self.run = run_of_checkpoint(path)
        states = content.get("callbacks", {})
        self.saved: Any = states.get(SaveCheckpoints.__qualname__, {})  # best values and their epochs
        self.purge_step: int = self.step + bool(content.get(WITHIN_STEP))
        self._asked = ""
        self._options: dict[str, Any] = content["hyper_parameters"]
        self._version: Any = known.get("version") if isinstance(known := content.get(DESCRIPTION), dict) else None
        self._weights: dict[str, Tensor] = content["state_dict"]
        self._optimizers: Any = content.get("optimizer_states")

    def decide(self, config: "Config", fits: bool = True, told: bool = True) -> "Config":
        """Returns a configuration with the model options of the checkpoint; prints those that differ if `told`.

        Evaluation options are taken from the configuration, except in training.
        """
        model, given = config["model"], dict(config["model"]["init_args"])
        free = () if fits else pkgutil.resolve_name(model["class_path"]).evaluation_options
        self._asked = model_named(given)
        unknown = [name for name in self._options if name not in given and name not in SET_BY_DATA]
        if unknown:
            old = self._version not in (None, version("linvit"))
            whose = f"is of linvit {self._version}" if old else "belongs to another task"
            option = f"--model.pretrained={shlex.quote(Path(self.path).as_posix())}"
            raise UserError(
                f"checkpoint '{self.path}' {whose} ({model_named(self._options)}): {model['class_path']} takes no "
                f"{', '.join(unknown)}. {option} in place of --ckpt_path takes its weights alone"
            )
        for name, value in {"pretrained": None, **self._options}.items():
            if name in SET_BY_DATA or name in SET_BY_RUN:
                continue
            if name in free:
                if told and not equal_options(given[name], value):
                    rank_zero_info(f"evaluated with --model.{name}={given[name]}; the run had {value}")
                continue
            if told and not equal_options(given[name], value):
                rank_zero_info(
                    f"the checkpoint decides the model: --model.{name}={given[name]} is ignored, it is {value}. "
                    f"To train another model, leave --ckpt_path out"
                )
            given[name] = value
        return {**config, "model": {**model, "init_args": given}}

    def facts(self, names: Sequence[str], data: "ImageData", same_classes: bool, way: str) -> dict[str, Any]:
        """Returns the checkpoint's values of the arguments that the data sets; raises a `UserError` if they differ.

        Class names are compared if `same_classes`. `way` is the advice about classes in errors.
        """
        own = {name: self._options.get(name, 3) if name == "in_chans" else self._options[name] for name in names}
        if same_classes and "num_classes" in own and data.num_classes not in (None, own["num_classes"]):
            count = own["num_classes"]
            raise UserError(
                f"checkpoint '{self.path}' was trained on {count} classes, but the data has {data.num_classes}{way}"
            )
        if same_classes and "class_names" in own:
            self._check_names(data.class_names, way)
        if own.get("in_chans", data.in_chans) != data.in_chans:
            raise UserError(
                f"checkpoint '{self.path}' was trained on images of {own['in_chans']} channels, but the data gives "
                f"{data.in_chans}: set --data.bands, --data.value_range, --data.mean and --data.std as in the "
                f"configuration of its run"
            )
        return own

    def _check_names(self, names: Sequence[str] | None, way: str) -> None:
        """Raises a `UserError` if the data numbers the classes differently; warns about classes with other names."""
        trained: Sequence[str] | None = self._options.get("class_names")
        if not names or not trained or len(names) != len(trained) or [*names] == [*trained]:
            return
        places = {name: number for number, name in enumerate(trained)}
        if places.keys().isdisjoint(names):
            places |= {str(number): number for number in range(len(trained))}  # the folder names of ImageNet-V2
        other = [number for number, name in enumerate(names) if name != trained[number]]
        moved = [number for number in other if places.get(names[number], number) != number]
        if moved:
            raise UserError(
                f"checkpoint '{self.path}' has other numbers for classes of the data: '{names[moved[0]]}' is number "
                f"{places[names[moved[0]]]} of it, and {moved[0]} of the data{way}"
            )
        rank_zero_warn(
            f"{len(other)} of {len(names)} classes have other names in the data than in checkpoint '{self.path}', and "
            f"are taken for the same by their numbers, such as '{names[other[0]]}' for '{trained[other[0]]}'"
        )

    @contextmanager
    def building(self, named: object) -> Iterator[None]:
        """Context in which the model of the checkpoint is built, without other weights."""
        try:
            with skip_pretrained(), restrict_imports_to(named):
                yield
        except UserError:
            raise
        except Exception as error:  # options of any content
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise UserError(f"the options in checkpoint '{self.path}' build no model: {reason}") from error

    def check_weights(self, model: nn.Module) -> None:
        """Raises a `UserError` with the first differences if the weights do not fit the model, or are not finite."""
        check_same_model(self.path, self._weights, model, model_named(self._options), self._asked)
        if bad := not_finite(model, {"state_dict": self._weights, "optimizer_states": self._optimizers}):
            raise UserError(
                f"checkpoint '{self.path}' has non-finite weights: {quote_first(bad, 3)}. Use an earlier one; look in "
                f"{Path(self.path).parent}"
            )
        self._weights, self._optimizers = {}, None  # Lightning loads them from the file


def read_checkpoint(path: str | Path, resumed: bool = False) -> dict[str, Any]:
    """Returns a checkpoint's content, with `hyper_parameters` and `state_dict`. Nothing in the file is executed."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"checkpoint '{path}' does not exist")
    option = f"--model.pretrained={shlex.quote(path.as_posix())}"
    start = f"\nTo start from the weights of another program: {option}, without --ckpt_path"
    run = run_of_checkpoint(path)
    whole = ""
    if run is not None and run_config(run).exists():
        whole = f"\nTo resume from the newest intact checkpoint:\n  {RunFolder(run).command}"
    try:
        content = torch_file.load(path, objects=False)
        return check_content(content, path, resumed)
    except UserError as error:
        raise UserError(f"checkpoint {error}; look for other checkpoints in {path.parent}{start}{whole}") from error


def check_same_model(
    path: str | Path, weights: dict[str, Tensor], model: nn.Module, of: str = "", asked: str = ""
) -> None:
    """Raises a `UserError` that names both models and the first differences if weights do not fit the model."""
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in weights]
    wrong += [f"{name} is unknown" for name in weights if name not in own]
    wrong += [
        f"{name} is {tuple(weights[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        models = f"it names {of}" if asked in ("", of) else f"it is of {of}, and the configuration is of {asked}"
        raise UserError(f"checkpoint '{path}' belongs to another model; {models}: {'; '.join(wrong[:3])}{more}")


def checkpoint_in(path: str | Path, names: Sequence[str], option: str = "--ckpt_path") -> Path:
    """Returns the first of these checkpoints in a run's folder and prints it; returns any other path unchanged."""
    folder = Path(path) / CHECKPOINTS
    if not folder.is_dir():
        return Path(path)
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        others = ", ".join(sorted(file.name for file in folder.glob("*.ckpt")))
        raise UserError(
            f"the run '{path}' has no {' and no '.join(names)} yet. "
            + (f"Name one of its checkpoints, {option} {folder}/NAME: {others}" if others else "It has no checkpoint")
        )
    rank_zero_info(f"{option}={path} is a run folder: using its {found.relative_to(path)}")
    return found


def run_to_resume(config: "Config", root: Path) -> Path | None:
    """Returns the run of the last configuration, or the newest of its name with this model and seed; else None."""
    if (own := run_of_config(config["config"])) is not None:
        return own
    empty: Path | None = None
    for run in reversed(versions(root / run_name(config["config"]))):
        if not (run / CONFIG).exists():  # it ended before training began; an earlier run may have begun
            empty = empty or run
        elif not (differences := differs(run, config)):
            return run
        else:
            rank_zero_info(f"--resume=auto skips {shown(run)}, which has {'; '.join(differences)}")
    return empty


def differs(run: Path, config: "Config") -> list[str]:
    """Returns options of the model, and the seed, that differ between a run and a configuration, if both have them."""
    try:
        theirs, own = _model_options(yaml_text.mapping(run / CONFIG)), _model_options(config)
    except (UserError, KeyError, TypeError, AttributeError):
        return []  # killed before it saved its configuration
    free = {f"model.{name}" for name in SET_BY_RUN}
    if not own.get("model.teacher") or not theirs.get("model.teacher"):
        free.remove("model.teacher")  # a student may be in the same folder as its teacher, with the same name and model
    return _differing(theirs, own, free)


def other_data(run: Path, config: "Config") -> list[str]:
    """Returns options of the data that differ between a run and a configuration, without those of loading speed."""
    try:
        theirs, own = (flat({"data": given["data"]["init_args"]}) for given in (RunFolder(run).config, config))
    except (UserError, KeyError, TypeError, AttributeError):
        return []  # the configuration cannot be read
    return _differing(theirs, own, {"data.batch_size", "data.num_workers", "data.predict_path"})


def _model_options(config: "Config") -> dict[str, Any]:
    model = config["model"]
    options = {f"model.{name}": value for name, value in model["init_args"].items()}
    return {"seed_everything": config["seed_everything"], "model": model["class_path"], **options}


def _differing(theirs: "Config", own: "Config", free: Set[str]) -> list[str]:
    both = [name for name in own if name in theirs and name not in free]
    return [f"{name}={theirs[name]} and not {own[name]}" for name in both if not equal_options(own[name], theirs[name])]


def whole_checkpoints(run: Path) -> Iterator[Checkpoint]:
    """Yields the checkpoints of a run that can be resumed: last.ckpt, then the newest; warns of those it skips."""
    folder = run / CHECKPOINTS
    if (last := _whole(folder / LAST)) is not None:
        yield last
    others = [_whole(path) for path in folder.glob("*.ckpt") if path.name != LAST]
    yield from sorted(filter(None, others), key=lambda other: (other.step, str(other.path)), reverse=True)


Found = tuple[Path | None, Checkpoint | None, bool]
"""The run to resume or None, its checkpoint or None, and True if the run is finished."""


def find(config: "Config", root: Path) -> Found:
    """Finds the run that a configuration resumes, and prints which one."""
    run, trainer = run_to_resume(config, root), config["trainer"]
    if run is None:
        rank_zero_info(
            f"--resume=auto: there is no matching run of '{run_name(config['config'])}' in {shown(root)}; starting one"
        )
        return None, None, False
    candidates = whole_checkpoints(run)
    checkpoint = next(candidates, None)
    if checkpoint is None:
        damaged = any((run / "checkpoints").glob("*.ckpt"))
        way = "all of its checkpoints are damaged, so a new run starts" if damaged else "it has no checkpoint yet"
        (rank_zero_warn if damaged else rank_zero_info)(f"--resume=auto: {shown(run)}: {way}")
        return None if damaged else run, None, False
    if others := other_data(run, config):
        rank_zero_warn(
            f"--resume=auto compares the name of the configuration, the model and the seed, and {shown(run)} has "
            f"{'; '.join(others)}. If it is another experiment, start this one without --resume"
        )
    epochs = trainer["max_epochs"] is not None and 0 <= trainer["max_epochs"] <= checkpoint.epochs
    steps = 0 <= trainer["max_steps"] <= checkpoint.step
    early = checkpoint.stopped_early and "EarlyStopping" in str(trainer["callbacks"])
    unscored = checkpoint.step == trainer["max_steps"] and checkpoint.within_validation
    if epochs or early or (steps and not unscored):
        ways = {"raise --trainer.max_epochs": epochs, "raise --trainer.max_steps": steps}
        ways |= {"remove EarlyStopping from --trainer.callbacks": early}
        way = " and ".join(way for way, ended in ways.items() if ended)
        rank_zero_info(
            f"--resume=auto: {shown(run)} is finished already, at step {checkpoint.step}, {checkpoint.epochs} epochs. "
            f"To train it for longer, {way}; to start again, omit --resume"
        )
        return run, checkpoint, True
    if steps:  # after the last step Lightning starts no validation, so the steps before it are repeated
        last, checkpoint = checkpoint, next((each for each in candidates if each.step < checkpoint.step), None)
        told = f"{shown(run)} was trained to its end, but its last validation is missing"
        if checkpoint is None:
            raise UserError(
                f"{told}, and it has no earlier checkpoint to resume from. To train it again, delete its folder; to "
                f"score it:\n  linvit validate --config {in_shell(run_config(run))} --ckpt_path "
                f"{in_shell(Path(last.path))}"
            )
        rank_zero_warn(f"--resume=auto: {told}")
    rank_zero_info(f"--resume=auto: {shown(run)} resumes from {Path(checkpoint.path).name}, step {checkpoint.step}")
    return run, checkpoint, False


class SameCheckpoint(Callback):
    """Checks that all ranks have found the same run as rank 0: shared file systems may be out of date."""

    def __init__(self, found: Found) -> None:
        run, checkpoint, _ = found
        self.found = str(run), checkpoint and str(checkpoint.path), checkpoint and checkpoint.step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises a `UserError` on a rank that differs."""
        first = trainer.strategy.broadcast(self.found)
        if first != self.found:
            raise UserError(
                f"--resume=auto found {self.found} (run, checkpoint, step) on rank {trainer.global_rank}, and {first} "
                f"on rank 0. If they share a file system, start again: one machine saw an outdated state"
            )


def _whole(path: Path) -> Checkpoint | None:
    if not path.exists():
        return None
    try:
        return Checkpoint(path, resumed=True)
    except UserError as error:
        reason = str(error.__cause__ or error).partition("\n")[0]  # without advice
        rank_zero_warn(f"--resume=auto skips {shown(path)}: {reason}")
        return None
