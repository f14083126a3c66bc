"""What is leaned on in Lightning and torch that they do not document: each place, and what to do when it is gone."""

import inspect

import pytest
import torch
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from torchmetrics.classification import MulticlassConfusionMatrix
from torchmetrics.utilities import dim_zero_sum

from linvit.attention.ops.decorators import in_transform
from linvit.attention.ops.functional import is_exporting
from linvit.tasks.parameter_groups import adamw
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
    assert names <= fit.keys(), "exact_resume.py and safe_loading.py have to read another layout of checkpoints"
    assert "_batches_that_stepped" in fit["epoch_loop.state_dict"], "exact_resume.py has to count steps by another name"
    assert hasattr(_FitLoop, "restarted_mid_epoch"), (
        "exact_resume.py has to ask another name whether an epoch is resumed"
    )


def test_lightning_asks_the_ranks_for_a_signal_by_the_method_that_is_left_out():
    said = "stop_on_signal.py has to find another way to keep Lightning from waiting for the device before each batch"
    assert hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"), said


def test_a_fused_optimiser_skips_a_step_on_the_device():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = adamw([{"params": [weight]}], 0.1, (0.9, 0.999), fused=True)
    weight.grad = torch.ones(3)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    said = "torch's fused AdamW no longer reads found_inf: non_finite.py has to skip a step in another way"
    assert torch.equal(weight.detach(), torch.ones(3)), said


def test_lightning_reads_a_checkpoint_by_the_method_that_is_guarded():
    source = inspect.getsource(_CheckpointConnector.resume_start)
    said = "safe_loading.py has to guard what Lightning calls now in place of strategy.load_checkpoint"
    assert "strategy.load_checkpoint(checkpoint_path, weights_only=" in source, said


def test_lightning_clips_before_a_fused_optimiser():
    optimizer = adamw([{"params": [torch.nn.Parameter(torch.ones(3))]}], 0.1, (0.9, 0.999), fused=True)
    said = "optim.py has to tell Lightning by another name than _step_supports_amp_scaling that it may clip gradients"
    assert not _optimizer_handles_unscaling(optimizer), said
    optimizer._step_supports_amp_scaling = True
    assert _optimizer_handles_unscaling(optimizer), said


def test_torch_says_whether_a_transform_runs_and_whether_it_exports():
    """By private names that torch 2.15 has."""
    found = []

    class Asks(torch.nn.Module):
        def forward(self, x):
            found.append((in_transform(), is_exporting()))
            return x + 1

    Asks()(torch.ones(2))
    torch.func.vmap(Asks())(torch.ones(2))
    torch.export.export(Asks(), (torch.ones(2),))
    said = "in_transform or is_exporting has to ask torch by another name"
    assert [found[0], found[1], found[-1]] == [(False, False), (True, False), (False, True)], said
    copied = [torch.zeros(1), torch.zeros(1)]
    torch._foreach_copy_(copied, [torch.ones(1), torch.ones(1)])
    assert sum(copied) == 2, "cast_linear.py has to convert weight and bias by another name, in one launch"


def test_a_metric_says_how_the_ranks_reduce_its_states():
    said = "add_up_over_ranks of execution.py has to ask torchmetrics by another name than _reductions"
    assert MulticlassConfusionMatrix(3)._reductions == {"confmat": dim_zero_sum}, said
