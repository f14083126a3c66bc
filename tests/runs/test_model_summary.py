"""Lightning's model summary, which counts parameters and runs nothing: its counts fail at views of parameters."""

import io
import sys

import pytest
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar

from linvit.callbacks.monitors import ProgressBar
from linvit.io.plain_text import PrintableStream
from linvit.runs.trainer import add_displays
from tests.cli.runs import QUICKSTART, linvit, tiny

CHOICE = "lightning.pytorch.trainer.connectors.callback_connector._RICH_AVAILABLE"


def test_a_network_with_attention_pooling_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(CHOICE, True)  # where rich is installed the summary is plain text, too
    backbone = "{name: timm, model: test_vit3}"  # its pooling makes queries of a parameter
    options = ["--trainer.fast_dev_run=true", '--model.freeze=["blocks.0"]']
    done = linvit("fit", f"--config={QUICKSTART}", *tiny(model__backbone=backbone), *options, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "760 K     Trainable params" in done.log
    assert "76.3 K    Non-trainable params" in done.log
    assert "model summary" not in done.log.lower()  # Lightning has nothing to say of its choice


@pytest.mark.parametrize(("chosen", "other"), [(RichModelSummary, ProgressBar), (RichProgressBar, ModelSummary)])
def test_those_of_rich_stay_and_their_codes_reach_the_terminal(monkeypatch, chosen, other):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", PrintableStream(terminal))
    callbacks = [chosen.__new__(chosen)]  # without rich they cannot be made
    add_displays(callbacks)
    assert [type(callback) for callback in callbacks] == [chosen, other]
    assert sys.stdout is terminal
