"""Lightning's plug-in that writes checkpoints whole, with a checksum, and reads none that is damaged."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from linvit import checksum
from linvit.files import replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file beside its place, which it takes once the disk has all of it.

    So a kill, a full disk or a power cut at any moment leaves the old file or the new one, and never a part. Lightning
    writes to the system's temporary folder, from where a file is copied over the old one, if that is on another disk.
    A replaced last.ckpt is kept as previous.ckpt. Each file has a checksum of its content (`linvit.checksum`),
    and is compared with it before it is loaded.

    Use it in any program: `Trainer(plugins=[AtomicCheckpointIO()])`. Paths with "://" are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint."""
        if is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                hashing = Hashing(file)
                try:
                    torch.save(checkpoint, hashing)  # type: ignore[arg-type]
                except RuntimeError as error:  # of torch, which words the file's own otherwise
                    raise hashing.error or error from error
                checksum.append(file, hashing.digest.hexdigest())
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads a checkpoint."""
        if not is_remote(path) and Path(path).is_file():
            checksum.verify(Path(path))
        return super().load_checkpoint(path, map_location, weights_only)


class Hashing:
    """What `torch.save` writes to: hands all bytes on to a file, and keeps their SHA-256 and what went wrong."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Writes and counts in."""
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Nothing: the file is flushed when it is complete."""


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL, such as s3://bucket/x.ckpt."""
    return "://" in str(path)
