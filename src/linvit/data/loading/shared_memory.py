"""Loader processes pass their batches on in shared memory, of which containers often have little."""

import shutil
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

SHARED_MEMORY = Path("/dev/shm")
PREFETCH = 2  # batches that a loader process prepares ahead, torch's default
MIB = 2**20


def needed(batch_size: int, image_bytes: int, num_workers: int) -> int:
    """Computes the bytes of all batches that exist at once: those prefetched, and one in the making per process."""
    return batch_size * image_bytes * num_workers * (PREFETCH + 1)


def check_shared_memory(batch_size: int, image_bytes: int, num_workers: int, ranks: int = 1) -> None:
    """Warns if the batches that may exist at once do not fit into the free part of /dev/shm."""
    wanted = needed(batch_size, image_bytes, num_workers * ranks)
    if wanted and SHARED_MEMORY.exists() and wanted > shutil.disk_usage(SHARED_MEMORY).free:
        usage = describe_shared_memory(batch_size, image_bytes, num_workers, ranks)
        rank_zero_warn(f"loader processes may be killed for lack of shared memory: {usage}")


def describe_shared_memory(batch_size: int, image_bytes: int, num_workers: int, ranks: int = 1) -> str:
    """Says how much there is, how much is needed, and which settings change that."""
    usage = shutil.disk_usage(SHARED_MEMORY)
    each = f" x {ranks} devices" if ranks > 1 else ""
    return (
        f"{SHARED_MEMORY} has {usage.total / MIB:.0f} MiB, {usage.free / MIB:.0f} free; "
        f"{num_workers} processes x {PREFETCH + 1} batches of {batch_size * image_bytes / MIB:.1f} MiB{each} may take "
        f"{needed(batch_size, image_bytes, num_workers * ranks) / MIB:.0f}. Lower --data.num_workers or "
        f"--data.batch_size, or give the container more (docker run --shm-size=8g, or --ipc=host)"
    )


def explain(exception: BaseException, batch_size: int, image_bytes: int, num_workers: int) -> None:
    """Adds the state of shared memory to the error of a loader process that was killed, unless it was terminated."""
    text = str(exception)
    killed = isinstance(exception, RuntimeError) and "DataLoader worker" in text and "Terminated" not in text
    if num_workers and killed and SHARED_MEMORY.exists():
        exception.add_note(
            f"If it was for lack of shared memory: {describe_shared_memory(batch_size, image_bytes, num_workers)}"
        )
