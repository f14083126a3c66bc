"""Runs in Python: no command line is read, and nothing ends the process."""

import signal

import pytest
from lightning.pytorch import Callback

import linvit
from linvit.runs.folder import RunFolder
from linvit.runs.result import read
from tests.cli.runs import TINY, collect_garbage


class Interrupt(Callback):
    """Of someone who stops a cell of a notebook."""

    def on_train_batch_end(self, *_):
        raise KeyboardInterrupt


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder, and a command line that is no business of a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["notebook", "--model.attention=gone"])
    yield tmp_path
    collect_garbage()


def test_a_run_is_trained_tested_and_used(place, capsys):
    run = linvit.fit("quickstart", TINY, attention="linear")
    assert run.folder == place / "checkpoints/quickstart/version_0"
    assert run.task.hparams["attention"] == run.config["model"]["init_args"]["attention"] == "linear"
    scores = run.test()
    assert f"{scores['test/score']:.7g}" in capsys.readouterr().out
    assert RunFolder(run.folder).complete
    command = "linvit fit --config checkpoints/quickstart/version_0/config.yaml"
    assert read(run.folder / "result.json")["command"] == command
    again = linvit.Run.from_config(linvit.read_config(run.folder, {"ckpt_path": run.folder}), "test")
    assert again.config["ckpt_path"].endswith("best.ckpt")
    assert again.test() == scores


def test_who_stops_a_cell_gets_the_prompt_back(place):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        linvit.fit("quickstart", {**TINY, "trainer.callbacks+": f"{__name__}.Interrupt"})
    assert signal.getsignal(signal.SIGINT) is before


def test_a_wrong_option_is_named(place):
    with pytest.raises(linvit.UserError, match="Did you mean 'attention'"):
        linvit.fit("quickstart", TINY, atention="linear")


def test_a_model_without_weights_is_not_scored_unless_it_is_asked_for(place):
    config = linvit.read_config("quickstart", TINY)
    with pytest.raises(linvit.UserError, match="needs weights"):
        linvit.Run.from_config(config).test()
    assert 0 <= linvit.Run.from_config(config, "test", untrained=True).test()["test/score"] <= 1
