"""What is leaned on in Lightning and torch that they do not document: each place, and what to do when it is gone."""

import inspect

import pytest
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from torch.nn.parallel import DistributedDataParallel

from linvit.optim import adamw
from tests.training import trainer


@pytest.mark.parametrize("name", ["update_train_step_metrics", "log_metrics", "metrics"])
def test_rows_can_be_logged_before_their_checkpoint(tmp_path, name):
    connector = trainer(tmp_path)._logger_connector
    assert isinstance(connector, _LoggerConnector), (
        "log_now of save_checkpoints.py needs another way to Lightning's rows"
    )
    assert hasattr(_LoggerConnector, name), f"{name} is gone: log_now of save_checkpoints.py has to log by another name"


def test_the_progress_of_the_loops_has_the_names_that_are_changed(tmp_path):
    fit = trainer(tmp_path).fit_loop.state_dict()
    names = {
        "epoch_progress",
        "epoch_loop.batch_progress",
        "epoch_loop.val_loop.batch_progress",
        "epoch_loop.state_dict",
    }
    assert names <= fit.keys(), "loop_state.py and checkpoint_content.py have to read another layout of checkpoints"
    assert hasattr(_FitLoop, "restarted_mid_epoch"), (
        "exact_resume.py has to ask another name whether an epoch is resumed"
    )


def test_a_fused_optimiser_skips_a_step_on_the_device():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = adamw([{"params": [weight]}], 0.1, (0.9, 0.999), fused=True)
    weight.grad = torch.ones(3)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    said = "torch's fused AdamW no longer reads found_inf: non_finite.py has to skip a step in another way"
    assert torch.equal(weight.detach(), torch.ones(3)), said


def test_ddp_can_be_kept_from_broadcasting():
    source = inspect.getsource(DistributedDataParallel)
    assert "require_forward_param_sync" in source, "execution.py has to pause DDP's broadcasts by another name"
