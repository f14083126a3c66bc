"""Checkpoints that survive kills, full disks and flipped bits."""

from linvit.checkpointing.checkpoint_io import AtomicCheckpointIO

__all__ = ["AtomicCheckpointIO"]
