"""Samples of every task can be sent to processes that are spawned, not forked."""

import pickle

import pytest
import torch

from linvit.runs.options import read_config
from linvit.runs.run import Run


@pytest.mark.parametrize(
    "config", ["quickstart", "segmentation_quickstart", "detection_quickstart", "diagnostics/recall"]
)
def test_samples_can_be_sent_to_spawned_processes(config):
    """As on Windows and macOS, and on Linux from Python 3.14 on; a trainer cannot be sent."""
    data = Run.from_config(read_config(config, {"data.num_workers": 0})).data
    data.setup("fit")
    both = data.train_set, data.val_dataloader().dataset
    data.trainer = lambda: None
    for samples in both:
        again = pickle.loads(pickle.dumps(samples))
        assert torch.equal(again[0]["image"], samples[0]["image"])
