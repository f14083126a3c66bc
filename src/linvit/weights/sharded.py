"""Checkpoints in folders, as `torch.distributed.checkpoint` writes them: looked through before torch opens them.

torch unpickles the table of contents of such a folder freely, and everything in it that is not a tensor.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from linvit import checksum
from linvit.errors import UserError
from linvit.weights import torch_file

CONTENTS = ".metadata"
OTHERS = "meta.pt"  # of Lightning: all that is neither weights nor the optimiser's
WEIGHTS = ("model", "state_dict")  # what Lightning's strategies call them
NAMES = {  # what a table of contents is made of, besides torch's dtypes
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath"},
}


class _Contents(pickle.Unpickler):
    """Reads a table of contents, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def is_sharded(path: Path) -> bool:
    """Whether a path is that of a checkpoint in a folder."""
    return (path / CONTENTS).is_file()


def outline(folder: Path) -> dict[str, Any]:
    """What a checkpoint of Lightning in a folder holds, with empty tensors on the device "meta" for its weights."""
    described = check_sharded(folder).state_dict_metadata
    content = torch_file.load(folder / OTHERS, objects=False) if (folder / OTHERS).is_file() else {}
    parts = [(name.partition("."), about) for name, about in described.items() if hasattr(about, "size")]
    weights = {
        name: torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        for (part, _, name), about in parts
        if part in WEIGHTS
    }
    optimizers = sorted({part for (part, _, _), _ in parts if part not in WEIGHTS})
    return {
        **content,
        "state_dict": weights,
        "optimizer_states": [{"state": {}, "param_groups": []} for _ in optimizers],
    }


def check_sharded(folder: Path) -> Any:
    """Returns the table of contents of a checkpoint in a folder."""
    if not (folder / CONTENTS).is_file():
        raise UserError(f"'{folder}' is a folder, and not one of torch.distributed.checkpoint: it has no {CONTENTS}")
    checksum.verify(folder)
    try:
        with (folder / CONTENTS).open("rb") as file:
            contents = _Contents(file).load()
        for index, place in contents.storage_data.items():
            if getattr(place, "transform_descriptors", None):
                raise pickle.UnpicklingError("its parts are compressed")
            if type(contents.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata":
                with (folder / place.relative_path).open("rb") as part:
                    part.seek(place.offset)
                    torch.load(io.BytesIO(part.read(place.length)), weights_only=True)
    except Exception as error:  # bytes of any kind
        raise UserError(f"checkpoint '{folder}' is not opened: {type(error).__name__}: {error}") from error
    if (folder / OTHERS).is_file():
        torch_file.load(folder / OTHERS, objects=False)
    return contents
