"""Strategies as fragments: they are understood with any experiment, and do what they say."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from torch.distributed.fsdp import FullyShardedDataParallel

from linvit import UserError
from linvit.tasks.model_ema import check_ema_support
from tests.cli.runs import QUICKSTART, linvit, tiny
from tests.training import TINY, tiny_task

FOLDER = Path(__file__).parents[2] / "configs" / "base" / "strategy"


def built(name):
    """The strategy of a fragment."""
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=Strategy)
    given = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["trainer"]["strategy"]
    return parser.instantiate_classes(parser.parse_object({"strategy": given})).strategy


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


def test_ddp():
    strategy = built("ddp")
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_kwargs["find_unused_parameters"] is False


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


def test_fsdp_without_cuda_is_a_user_error(tmp_path):
    done = linvit("fit", f"--config={QUICKSTART}", f"--config={FOLDER / 'fsdp.yaml'}", *tiny(), cwd=tmp_path)
    assert done.code == 2
    assert "requires a GPU accelerator" in done.err


def test_an_average_of_a_sharded_model_is_refused():
    with pytest.raises(UserError, match="a strategy that does not shard the model"):
        check_ema_support(SimpleNamespace(strategy=built("fsdp"), precision="bf16-mixed"))
