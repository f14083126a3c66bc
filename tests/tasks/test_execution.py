"""What changes how a network runs and none of its results: compiling, recomputing, several devices."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

import linvit
from linvit.analysis.operations import kept_for_backward
from linvit.callbacks import AttentionRank
from linvit.errors import UserError
from linvit.tasks import ClassificationTask
from linvit.tasks.execution import Execution, enable_grad_checkpointing
from tests.cli.forked import Ranks
from tests.tasks.two_ranks import run, write
from tests.training import SIDE, Memory, fit, tiny_task


@pytest.fixture
def graphs(monkeypatch):
    """torch.compile without its compiler, which takes half a minute; counts the graphs that it would get."""
    found = []

    def keep(graph, inputs):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    torch._dynamo.reset()
    return found


class TestCompile:
    """One flag; names, weights and results stay as they are."""

    def test_names_carry_no_prefix_and_go_both_ways(self, tmp_path, graphs):
        task = tiny_task(compile=True, ema_decay=0.9)
        fit(task, tmp_path).save_checkpoint(tmp_path / "x.ckpt")
        assert graphs
        saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
        assert saved.keys() == tiny_task(ema_decay=0.9).state_dict().keys()
        plain = ClassificationTask.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True, compile=False)
        images = torch.randn(2, 3, SIDE, SIDE)
        assert torch.allclose(plain.eval()(images), task.eval()(images), atol=1e-6)
        again = ClassificationTask.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True, compile=True)
        assert torch.allclose(again.eval()(images), task(images), atol=1e-6)

    def test_the_rank_is_still_heard(self, tmp_path, graphs):
        memory, callback = Memory(), AttentionRank(every_n_steps=2, max_share=None)
        fit(tiny_task(compile=True), tmp_path, 32, logger=memory, callbacks=[callback])
        assert [step for step, _ in memory.values["rank/blocks.0.attn"]] == [0, 2]
        assert graphs, "nothing was compiled"

    @pytest.mark.slow
    def test_with_the_real_compiler(self, tmp_path):
        losses = []
        for compiled in (False, True):
            runner = fit(tiny_task(compile=compiled, drop_path_rate=0.0), tmp_path)
            losses.append(runner.callback_metrics["train/loss"].item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


class TestMatmulPrecision:
    """An option of a run, which leaves torch's setting as it was."""

    def test_it_lasts_as_long_as_the_run(self, tmp_path):
        seen = []

        class Look(Callback):
            def on_train_batch_start(self, *args):
                seen.append(torch.get_float32_matmul_precision())

        fit(tiny_task(float32_matmul_precision="high"), tmp_path, callbacks=[Look()])
        assert set(seen) == {"high"}
        assert torch.get_float32_matmul_precision() == "highest"

    def test_others_are_refused(self):
        with pytest.raises(UserError, match="float32_matmul_precision"):
            tiny_task(float32_matmul_precision="tf32")


class TestGradientCheckpointing:
    """Less is kept, the gradient is the same."""

    def gradients(self, **options):
        task = tiny_task(**options)
        kept = []

        def pack(tensor):
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = task.train()(torch.ones(8, 3, SIDE, SIDE)).square().sum()
        loss.backward()
        return sum(kept), [weight.grad for weight in task.network.parameters()]

    def test_attention_keeps_its_features_only_if_it_may(self):
        lean, full = (self.gradients(attention="mlla", recompute_attention=on) for on in (True, False))
        assert lean[0] < full[0]
        task = tiny_task(attention="mlla", recompute_attention=False)
        assert {module.recompute for module in task.modules() if hasattr(module, "recompute")} == {False}
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(lean[1], full[1], strict=True))

    @pytest.mark.parametrize("free", [2**40, 2**20])
    def test_a_gpu_with_enough_memory_keeps_them(self, tmp_path, monkeypatch, free):
        task, images = tiny_task(attention="mlla"), torch.ones(8, 3, SIDE, SIDE)
        runner = fit(task, tmp_path)
        assert all(module.recompute for module in task.modules() if hasattr(module, "recompute"))  # as on any CPU
        monkeypatch.setattr(type(task), "device", property(lambda self: torch.device("cuda")))
        monkeypatch.setattr(Execution, "needed", lambda *_: 2.0**22)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        task.execution.on_train_batch_start(runner, task, {"image": images}, 0)
        keeps = {not module.recompute for module in task.modules() if hasattr(module, "recompute")}
        assert keeps == {free == 2**40}

    def test_what_a_step_keeps_is_found_in_a_copy(self, tmp_path):
        task = tiny_task(attention="mlla")
        runner = fit(task, tmp_path)
        state = torch.random.get_rng_state()
        one, two = (Execution.needed(runner, task, {"image": torch.ones(count, 3, SIDE, SIDE)}) for count in (8, 16))
        full = kept_for_backward(lambda: task.network.train()(torch.ones(8, 3, SIDE, SIDE)), task.network)
        assert two == 2 * one
        assert full < one < 10 * full
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(module.recompute for module in task.modules() if hasattr(module, "recompute"))

    def test_it_keeps_less_and_computes_the_same(self):
        much, plain = self.gradients()
        little, again = self.gradients(grad_checkpointing=True)
        assert little < much / 2
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, again, strict=True))

    def test_a_backbone_that_cannot(self):
        with pytest.raises(linvit.UserError, match="CannotCheckpoint has no gradient checkpointing"):
            enable_grad_checkpointing(CannotCheckpoint())
        with pytest.raises(linvit.UserError, match="Linear has no gradient checkpointing"):
            enable_grad_checkpointing(torch.nn.Linear(1, 1))


class CannotCheckpoint(torch.nn.Module):
    """As timm's models say it."""

    def set_grad_checkpointing(self, enable=True):
        assert not enable, "gradient checkpointing not supported"


@pytest.mark.parametrize(
    ("step", "last", "averaged"), [(0, False, False), (49, False, True), (3, True, True), (6, False, True)]
)
def test_the_loss_is_averaged_over_ranks_where_it_is_logged_or_the_last(monkeypatch, step, last, averaged):
    seen, options = [], {"world_size": 2, "log_every_n_steps": 50, "max_steps": 7}
    monkeypatch.setattr("linvit.tasks.base.total_over_ranks", lambda value: value + 1)
    monkeypatch.setattr(LightningModule, "log", lambda task, name, value, *_, **__: seen.append(value.item()))
    task = tiny_task()
    task._trainer = SimpleNamespace(global_step=step, is_last_batch=last, **options)
    task.log("train/loss", torch.tensor(3.0))
    assert seen == [2.0 if averaged else 3.0]


class TestTwoDevices:
    """17 images, 9 on one device and 8 on the other, in batches of 4: one device has a batch more."""

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("two")
        ranks = Ranks([], folder, 2, call=lambda: write(folder, 2))
        assert ranks.wait() == [0, 0], ranks.text()
        return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]

    def test_no_device_waits_and_both_know_the_same(self, found):
        _, (first, second) = found
        assert first["scores"] == second["scores"]
        assert first["validated"] == second["validated"]
        assert first["average"] == second["average"]

    def test_the_loss_of_training_is_the_mean_of_both(self, found):
        _, both = found
        assert both[0]["last_loss"] != both[1]["last_loss"]
        mean = sum(one["last_loss"] for one in both) / 2
        assert [one["train/loss"] for one in both] == pytest.approx([mean] * 2)

    def test_scores_are_those_of_one_device_over_the_whole_set(self, found, tmp_path):
        folder, (first, _) = found
        alone = run(tmp_path, devices=1, checkpoint=folder / "x.ckpt")
        assert first["validated"] == pytest.approx(alone["validated"], rel=1e-6)
        assert {"val/top1", "val/top5", "val/loss", "val/ema_top1", "val/ema_loss"} <= first["validated"].keys()
        # In training, devices score what the first one saves: their own statistics of batch norm would differ.
        assert first["scores"] == pytest.approx(alone["validated"], rel=1e-6)

    def test_each_image_counts_once_in_the_report(self, found):
        folder, (first, _) = found
        assert first["images"] == 17
        rows = (folder / "report" / "val_classes.csv").read_text().splitlines()[1:]
        assert sum(int(row.split(",")[1]) for row in rows) == 17
