"""The precision and the device of a run that names none."""

import pytest
import torch
import yaml

from linvit.errors import UserError
from linvit.runs.trainer import default_precision, usable_accelerator
from tests.cli.runs import QUICKSTART, flags, linvit, tiny


def device(monkeypatch, cuda, bfloat16):
    """A machine with a CUDA device or without, which computes in bfloat16 or emulates it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bfloat16
    )


@pytest.mark.parametrize(
    ("cuda", "bfloat16", "accelerator", "precision"),
    [
        (True, True, "auto", "bf16-mixed"),
        (True, True, "gpu", "bf16-mixed"),
        (True, True, "cuda", "bf16-mixed"),
        (True, True, "cpu", "32-true"),
        (True, False, "auto", "32-true"),
        (False, False, "auto", "32-true"),
    ],
)
def test_bfloat16_where_the_device_has_it(monkeypatch, caplog, cuda, bfloat16, accelerator, precision):
    device(monkeypatch, cuda, bfloat16)
    assert default_precision(accelerator) == precision
    (line,) = caplog.messages
    assert line.startswith(f"precision {precision}, since ")


@pytest.mark.parametrize(
    ("cuda", "asked", "used"),
    [(True, "auto", "cuda"), (True, "gpu", "gpu"), (False, "auto", "cpu"), (True, "cpu", "cpu"), (False, "tpu", "tpu")],
)
def test_an_apple_gpu_is_not_used(monkeypatch, cuda, asked, used):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert usable_accelerator(asked) == used


@pytest.mark.parametrize("asked", ["mps", "gpu"])
def test_an_apple_gpu_is_refused_by_name(monkeypatch, asked):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UserError, match=f"accelerator={asked} is Apple's GPU, which has no float64"):
        usable_accelerator(asked)


def test_a_named_one_holds(tmp_path):
    options = flags(trainer__precision="bf16-mixed", trainer__max_epochs=1, trainer__limit_train_batches=1)
    options += flags(trainer__limit_val_batches=1, data__batch_size=2)  # bfloat16 on a CPU takes its time
    done = linvit("fit", f"--config={QUICKSTART}", *tiny(), *options, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "since" not in done.log
    saved = (tmp_path / "checkpoints" / "quickstart" / "version_0" / "config.yaml").read_text()
    assert yaml.safe_load(saved)["trainer"]["precision"] == "bf16-mixed"
