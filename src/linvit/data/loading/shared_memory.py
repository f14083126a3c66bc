"""Loader processes hand their batches over in shared memory, which containers often have little of."""

import shutil
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

PLACE = Path("/dev/shm")
PREFETCH = 2  # batches that a loader process prepares ahead, torch's default
MIB = 2**20


def needed(batch_size: int, image_bytes: int, num_workers: int) -> int:
    """Bytes of the batches that wait at once, one more in the making in each loader process."""
    return batch_size * image_bytes * num_workers * (PREFETCH + 1)


def check_shared_memory(batch_size: int, image_bytes: int, num_workers: int, ranks: int = 1) -> None:
    """Warns if the batches that may wait at once do not fit into what is free in /dev/shm.

    Args:
        batch_size: Images per batch.
        image_bytes: Bytes of one image as the loader processes hand it over.
        num_workers: Loader processes of each rank.
        ranks: Ranks on this machine.
    """
    wanted = needed(batch_size, image_bytes, num_workers * ranks)
    if wanted and PLACE.exists() and wanted > shutil.disk_usage(PLACE).free:
        told = situation(batch_size, image_bytes, num_workers, ranks)
        rank_zero_warn(f"loader processes may be killed for want of shared memory: {told}")


def situation(batch_size: int, image_bytes: int, num_workers: int, ranks: int = 1) -> str:
    """What there is, what is needed, and which settings change that."""
    usage = shutil.disk_usage(PLACE)
    each = f" x {ranks} devices" if ranks > 1 else ""
    return (
        f"{PLACE} has {usage.total / MIB:.0f} MiB, {usage.free / MIB:.0f} free; "
        f"{num_workers} processes x {PREFETCH + 1} batches of {batch_size * image_bytes / MIB:.1f} MiB{each} may take "
        f"{needed(batch_size, image_bytes, num_workers * ranks) / MIB:.0f}. Lower --data.num_workers or "
        f"--data.batch_size, or give the container more (docker run --shm-size=8g, or --ipc=host)"
    )


def explain(exception: BaseException, batch_size: int, image_bytes: int, num_workers: int) -> None:
    """Adds the situation to the error of a loader process that was killed, unless it was told to end."""
    text = str(exception)
    killed = isinstance(exception, RuntimeError) and "DataLoader worker" in text and "Terminated" not in text
    if num_workers and killed and PLACE.exists():
        exception.add_note(f"If it was for want of shared memory: {situation(batch_size, image_bytes, num_workers)}")
