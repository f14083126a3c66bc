"""Strategies as fragments: they are understood with any experiment, and do what they say."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from linvit import UserError, load
from linvit.cli import main
from linvit.tasks.model_ema import WeightAveraging
from linvit.tasks.safe_loading import force_safe_loading
from tests.cli.forked import Ranks
from tests.cli.runs import QUICKSTART, linvit, tiny
from tests.training import TINY, KeepFirst, batches, fit, tiny_task, trainer

FOLDER = Path(__file__).parents[2] / "configs" / "base" / "strategy"


class OnCPU(FSDPStrategy):
    """FSDP without a GPU, which Lightning does not offer."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    def optimizer_state(self, optimizer):
        with mock.patch.object(Tensor, "cpu", Tensor.clone):  # torch gathers one state after the other in one place
            return super().optimizer_state(optimizer)


class AsFSDP(SingleDeviceStrategy):
    """What FSDP does to a task: optimisers see flat parameters, and checkpoints are opened without the weights."""

    def setup_optimizers(self, trainer):
        parameters = list(self.model.parameters())
        shapes = [parameter.shape for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.flatten()
        super().setup_optimizers(trainer)
        for parameter, shape in zip(parameters, shapes, strict=True):
            parameter.data = parameter.data.view(shape)

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        content = super().load_checkpoint(checkpoint_path, weights_only)
        self.lightning_module.load_state_dict(content.pop("state_dict"))
        return content

    def load_model_state_dict(self, checkpoint, strict=True):
        """Nothing: they are loaded."""


def built(name):
    """The strategy of a fragment."""
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=Strategy)
    given = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["trainer"]["strategy"]
    return parser.instantiate(parser.parse_object({"strategy": given})).strategy


@pytest.mark.parametrize("name", [path.stem for path in FOLDER.glob("*.yaml")])
def test_it_joins_an_experiment_from_the_command_line_and_as_a_base(name, tmp_path):
    fragment = FOLDER / f"{name}.yaml"
    (tmp_path / "mine.yaml").write_text(f"base: ['{QUICKSTART}', '{fragment}']\n")
    found = []
    for files in ([f"--config={QUICKSTART}", f"--config={fragment}"], ["--config=mine.yaml"]):
        done = linvit("fit", *files, "--print_config", cwd=tmp_path)
        assert done.code == 0, done.err
        found.append(yaml.safe_load(done.out)["trainer"]["strategy"])
    assert found[0] == found[1]
    assert found[0]["class_path"].endswith("Strategy")


@pytest.fixture
def group():
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield
    torch.distributed.destroy_process_group()


def test_fsdp_wraps_each_block_and_trains_alike(group):
    strategy = built("fsdp")
    assert isinstance(strategy, FSDPStrategy)
    task = tiny_task(backbone={**TINY, "depth": 3})
    images = torch.randn(2, 3, 16, 16)
    expected = task(images).detach()
    wrapped = FullyShardedDataParallel(task, device_id=torch.device("cpu"), **strategy.kwargs)
    names = [name for name, module in wrapped.named_modules() if isinstance(module, FullyShardedDataParallel)]
    assert [name.rpartition("blocks.")[2] for name in names] == ["", "0", "1", "2"]
    output = wrapped(images)
    assert torch.allclose(output, expected)
    output.sum().backward()
    assert all(weight.grad is not None for weight in wrapped.parameters())


def test_flat_parameters_are_grouped_by_their_shapes_and_weights_may_be_loaded_first(tmp_path):
    for epochs, source in ((1, None), (2, tmp_path / "last.ckpt")):
        runner = trainer(tmp_path, max_epochs=epochs, strategy=AsFSDP(torch.device("cpu")))
        runner.fit(task := tiny_task(), batches(8), ckpt_path=source)
        runner.save_checkpoint(tmp_path / "last.ckpt")
    assert runner.global_step == 2
    matrices, others = (group["params"] for group in runner.optimizers[0].param_groups)
    assert matrices
    assert all(weight.ndim > 1 for weight in matrices)
    assert {id(weight) for weight in task.parameters() if weight.ndim == 1} <= set(map(id, others))


def test_an_address_is_not_one_path_on_all_machines():
    """Lightning has all ranks read the path of rank 0, which would be that of its own temporary folder."""
    task, strategy = tiny_task(), FSDPStrategy()
    strategy._lightning_module = task
    force_safe_loading(strategy, task)
    with pytest.raises(UserError, match=r"from one path on all ranks: get 's3://runs/last.ckpt' first"):
        strategy.load_checkpoint("s3://runs/last.ckpt")


def test_ranks_without_weights_refuse_to_save_what_rank_0_refuses(tmp_path):
    runner = fit(task := tiny_task(), tmp_path)
    with (
        mock.patch.object(runner.strategy, "broadcast", return_value=["network.head.bias"]),
        pytest.raises(UserError, match=r"not finite at step 2, so it is not saved.*: 'network.head.bias'"),
    ):
        task.on_save_checkpoint({"state_dict": {}})


@pytest.mark.slow
def test_fsdp_saves_whole_checkpoints_and_resumes_to_the_same_weights(tmp_path):
    """Two ranks."""
    fragment = yaml.safe_load((FOLDER / "fsdp.yaml").read_text())
    fragment["trainer"]["strategy"]["class_path"] = f"{__name__}.{OnCPU.__name__}"
    (tmp_path / "quickstart.yaml").write_text(yaml.safe_dump(fragment))
    options = tiny(trainer__gradient_clip_val="null", trainer__limit_train_batches=2, data__batch_size=4)
    command = ["fit", f"--config={QUICKSTART}", "--config=quickstart.yaml", *options, "--trainer.devices=2"]
    command.append(f"--trainer.callbacks+={KeepFirst.__module__}.{KeepFirst.__name__}")
    kept = tmp_path / "checkpoints" / "quickstart" / "version_0" / "checkpoints"
    found = []
    for more in ([], [f"--ckpt_path={kept / 'first.ckpt'}"]):
        ranks = Ranks([], tmp_path, number=2, call=lambda more=more: main([*command, *more]))
        assert ranks.wait() == [0, 0], ranks.text()
        load(kept / "best.ckpt")
        found.append(torch.load(kept / "last.ckpt", weights_only=True))
    once, resumed = found
    assert once["global_step"] == resumed["global_step"] == 4
    for name, weight in once["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name]), name
    (optimizer,) = once["optimizer_states"]
    decayed = [optimizer["state"][i]["exp_avg"].ndim for i in optimizer["param_groups"][0]["params"]]
    assert decayed
    assert min(decayed) > 1


def test_an_average_of_a_sharded_model_is_refused():
    with pytest.raises(UserError, match="a strategy that does not shard the model"):
        WeightAveraging().setup(
            SimpleNamespace(strategy=built("fsdp"), precision="bf16-mixed"), tiny_task(ema_decay=0.5), "fit"
        )
