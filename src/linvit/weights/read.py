"""Reads weights from a file, a dict or the hub into one flat state dict, for all nestings and prefixes."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.weights import torch_file

SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".ckpt", ".tar")
HUB = "hf-hub:"  # prefix of the repositories of the Hugging Face hub
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin", "model.pth", "model.pt")
AVERAGED = ("state_dict_ema", "model_ema")
TRAINED, AVERAGE = "network.", "ema.network."  # prefixes of a task's weights, and of their moving average
WRITTEN_BY = "linvit"  # key in the metadata of a file that `linvit import-weights` wrote


@dataclass(frozen=True)
class Weights:
    """Weights of a source and their origin."""

    state: dict[str, Tensor]  # names of the source without prefixes of wrappers; for a network, its backbone
    source: str
    key: str  # place of the state in the source: "model", "state_dict.ema.network", or "" if it was not nested
    other_keys: tuple[str, ...]
    # Size of the training images; only the ratio counts: square unless linvit wrote the file with another size.
    # None for a state dict, whose tables may have any grid.
    img_size: tuple[int, int] | None
    file: Path | None
    beside: dict[str, Tensor] = field(default_factory=dict)  # the other tensors of a network, such as those of its head
    model: str = ""  # their model, if linvit wrote the file: "backbone deit_nano, attention focused"


def model_named(options: Any) -> str:
    """Describes the model in the options of a task; "" if they name none."""
    found = []
    for part in ("backbone", "attention", "head"):
        spec = options.get(part) if isinstance(options, Mapping) else None
        name = spec.get("name") if isinstance(spec, Mapping) else spec
        if isinstance(name, str) and name:
            found.append(f"{part} {name[:200]}")
    return ", ".join(found)


def read(source: str | Path | Mapping[str, Any], ema: bool | None = None) -> Weights:
    """Reads the weights of a path, a (wrapped) state dict, or a repository of the hub, `hf-hub:owner/name`.

    Nothing in a file is executed. `ema` asks for averaged weights; see `load_pretrained`.
    """
    if isinstance(source, Mapping):
        return _weights(source, "the state dict", ema, img_size=None)
    file = _file(source)
    content, img_size, model = content_of(file)
    if not isinstance(content, Mapping):
        raise UserError(f"'{file}' holds no weights but a {type(content).__name__}. Save model.state_dict() instead")
    return replace(_weights(content, f"'{source}'", ema, img_size, file), model=model)


def _file(source: str | Path) -> Path:
    """Returns the file of a source, which is downloaded if necessary."""
    path = Path(source)
    if path.is_file():
        return path
    if isinstance(source, str) and path.suffix not in SUFFIXES and is_repository(source):
        return download(source)
    folder = path if path.is_dir() else path.parent
    files = sorted(file.name for file in folder.iterdir() if file.suffix in SUFFIXES) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, files, n=5, cutoff=0.3) or files[:5]
    there = f" In '{folder}' there are: {', '.join(near)}." if near else ""
    raise UserError(
        f"'{source}' is not a file of weights.{there} A source is a file ({', '.join(SUFFIXES)}) or a repository "
        f"of the hub, {HUB}owner/name"
    )


def is_repository(source: str) -> bool:
    """Returns True if a source names a repository: `hf-hub:owner/name`, or `owner/name` if no such folder exists."""
    return source.startswith(HUB) or (REPOSITORY.fullmatch(source) is not None and not Path(source).parent.exists())


def download(source: str) -> Path:
    """Downloads the weights of a repository and returns the path of the local copy."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    path, _, revision = source.removeprefix(HUB).partition("@")
    owner, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    reason: Exception | None = None
    for candidate in [file] if file else HUB_FILES:
        try:
            return Path(hf_hub_download(f"{owner}/{name}", candidate, revision=revision or None))
        except EntryNotFoundError as error:
            reason = error
        except (OSError, ValueError) as error:
            reason = error
            break
    looked = file or ", ".join(HUB_FILES)
    raise UserError(
        f"no weights from '{source}': {' '.join(str(reason).split())[:300]}\n"
        f"  looked for {looked} in the repository '{owner}/{name}' of the hub. Name another file with "
        f"{HUB}{owner}/{name}/FILE, or download it and give its path"
    ) from reason


def content_of(file: Path) -> tuple[Any, tuple[int, int] | None, str]:
    """Returns the content of a file, the size of the images that it was trained on, and the model (`Weights`)."""
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata() or {}
                options: Any = {**metadata, **json.loads(metadata["options"])} if WRITTEN_BY in metadata else {}
                content = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except Exception as error:  # bytes of any kind
            raise torch_file.broken(file, error) from error
    else:
        content = torch_file.load(file)
        options = content.get("hyper_parameters") if isinstance(content, Mapping) else None
    try:
        return content, image_size(options["img_size"]), model_named(options)
    except (LookupError, TypeError, UserError):  # not written by linvit
        return content, (1, 1), model_named(options)


def _weights(
    content: Mapping[str, Any],
    source: str,
    ema: bool | None,
    img_size: tuple[int, int] | None,
    file: Path | None = None,
) -> Weights:
    """Finds the state dict in the content of a source, and removes the prefixes of its names."""
    orders = {None: ("model", *AVERAGED, "state_dict"), True: (*AVERAGED, "state_dict"), False: ("model", "state_dict")}
    order = orders[ema]
    path: list[str] = []
    others: tuple[str, ...] = ()
    inner = content
    while len(path) < 4:  # a file may contain itself
        key = next((key for key in order if isinstance(inner.get(key), Mapping)), None)
        if key is None:
            break
        others = others if path else tuple(str(other) for other in content if other != key)
        path.append(key)
        inner = inner[key]
        order = ("model", "state_dict")
    tensors = {str(key): _checked(key, value, source) for key, value in inner.items() if isinstance(value, Tensor)}
    plain = {_without_wrappers(name): tensor for name, tensor in tensors.items()}
    own = any(name.startswith("patch_embed.") for name in plain)  # VOLO also calls its blocks `network`
    below = {prefix: {} if own else _below(prefix, plain) for prefix in (TRAINED, AVERAGE)}
    branch = AVERAGE if ema and not set(AVERAGED) & set(path) else TRAINED
    if not plain or (branch == AVERAGE and not below[AVERAGE]):
        holds = ", ".join(map(str, list(content)[:10])) or "nothing"
        wanted = f"averaged weights ({', '.join(AVERAGED)} or {AVERAGE}*)" if ema else "weights"
        hint = "; set ema: false, or leave it out" if ema else ""
        raise UserError(f"{source} holds no {wanted}: it holds {holds}{hint}")
    if all(below.values()):  # a task's weights and their average are stored together
        path.append(branch.rstrip("."))
        others = (*(prefix.rstrip(".") for prefix in below if prefix != branch), *others)
    state, beside = split(below[branch] or plain)
    return Weights(state, source, ".".join(path), others, img_size, file, beside)


def split(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Splits the tensors of a network: those of its backbone, without `backbone.`, and others; else all and none."""
    backbone = _below("backbone.", state)
    if not backbone:
        return dict(state), {}
    return backbone, {name: tensor for name, tensor in state.items() if not name.startswith("backbone.")}


def _checked(name: str, value: Tensor, source: str) -> Tensor:
    """Returns the tensor, detached; raises a `UserError` if it is not dense."""
    tensor = value.detach()
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UserError(
            f"'{name}' of {source} is not a plain tensor; save the file again with dense, contiguous tensors"
        )
    return tensor


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with a prefix, without it."""
    return {
        _without_wrappers(name.removeprefix(prefix)): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def _without_wrappers(name: str) -> str:
    """Returns a name without the parts that DDP (`module.`) and torch.compile (`_orig_mod.`) add."""
    return re.sub(r"^(module\.)+", "", re.sub(r"(^|(?<=\.))_orig_mod\.", "", name))
