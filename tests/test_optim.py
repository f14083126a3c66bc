"""Parameter groups and the learning-rate schedule, by themselves and as a task hands them to AdamW."""

import pytest
import torch
from torch import nn

import linvit
from linvit import UserError
from linvit.optim import WarmupCosine, parameter_groups
from linvit.tasks.schedule import total_batch
from tests.training import TINY, batches, fit, tiny_task, trainer

PEAK, START, END = 1e-3, 1e-6, 1e-5
OPTIONS = {"lr": PEAK, "warmup_lr": START, "min_lr": END, "warmup_epochs": 1}


class Table(nn.Module):
    """Names a parameter, as timm's models do."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, 3))
        self.other = nn.Parameter(torch.zeros(2, 3))

    def no_weight_decay(self):
        return {"table"}


def names_of(model, groups):
    """Decay -> the names of its parameters, in a list, so that a repetition shows."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["weight_decay"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_vectors_and_what_a_module_names_are_spared_at_any_depth(depth):
    model, path = nn.ModuleDict({"tables": Table(), "linear": nn.Linear(3, 2), "norm": nn.BatchNorm2d(4)}), ""
    for _ in range(depth):
        model, path = nn.ModuleDict({"inner": model}), f"inner.{path}"
    found = names_of(model, parameter_groups(model, 1, 0.05))
    assert found == {
        0.05: [f"{path}tables.other", f"{path}linear.weight"],
        0.0: [f"{path}tables.table", f"{path}linear.bias", f"{path}norm.weight", f"{path}norm.bias"],
    }


def test_the_model_itself_may_name_what_is_spared():
    model = Table()
    assert names_of(model, parameter_groups(model, 1, 0.1)) == {0.1: ["other"], 0.0: ["table"]}


@pytest.mark.parametrize("attention", linvit.list_attentions())
def test_every_parameter_of_a_task_is_in_one_group_once(attention):
    task = tiny_task(attention=attention)
    found = names_of(task, parameter_groups(task, 1, 0.05))
    everything = sorted(name for name, _ in task.named_parameters())
    assert sorted(found[0.05] + found[0.0]) == everything
    assert {"backbone.pos_embed", "backbone.cls_token"} <= set(found[0.0])
    assert {"backbone.head.weight", "backbone.patch_embed.proj.weight"} <= set(found[0.05])
    assert not [name for name in found[0.05] if name.endswith("bias") or ".norm" in name]


def test_frozen_parameters_are_left_out():
    task = tiny_task()
    task.backbone.blocks.requires_grad_(False)
    found = names_of(task, parameter_groups(task, 1, 0.05))
    assert found[0.05] == ["backbone.patch_embed.proj.weight", "backbone.head.weight"]
    assert not [name for name in found[0.0] if ".blocks." in name]


def schedule(warmup=20, total=300, steps_per_epoch=10, **options):
    return WarmupCosine(PEAK, START, END, warmup, total, steps_per_epoch, **options)


@pytest.mark.parametrize(
    ("epoch", "rate"),
    [
        (0, START),
        (10, START + (PEAK - START) / 2),
        (20, END + (PEAK - END) * 0.98907380),  # (1 + cos(pi 20/300)) / 2: the cosine is not shifted by the warm-up
        (150, (PEAK + END) / 2),
        (300, END),
        (1000, END),
    ],
)
def test_rate_at_chosen_epochs(epoch, rate):
    assert schedule().at(epoch) == pytest.approx(rate, rel=1e-6)
    assert schedule()(10 * epoch) == schedule().at(epoch)


def test_the_rate_rises_through_the_warm_up_and_falls_after_it():
    rates = [schedule()(step) for step in range(3001)]
    assert rates[:200] == sorted(rates[:200])
    assert rates[200:] == sorted(rates[200:], reverse=True)
    assert max(rates) < PEAK


def test_no_warm_up_starts_at_the_peak():
    assert schedule(warmup=0)(0) == PEAK


def test_a_run_that_is_all_warm_up_never_reaches_the_peak():
    rates = [schedule(warmup=4, total=4, steps_per_epoch=1)(step) for step in range(6)]
    assert rates == pytest.approx([START + (PEAK - START) * step / 4 for step in range(4)] + [END, END])


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("steps_per_epoch", [1, 3, 7, 1251])
def test_per_epoch_the_rate_is_one_for_all_steps_of_an_epoch(steps_per_epoch, lag):
    rates = schedule(steps_per_epoch=steps_per_epoch, interval="epoch", lag=lag)
    for epoch in (0, 1, 2, 19, 20, 21, 299, 300):
        for step in {epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch - 1}:
            assert rates(step) == schedule().at(max(epoch - lag, 0))


def test_a_lag_repeats_the_first_rate():
    late, plain = schedule(lag=1), schedule()
    assert [late(step) for step in range(5)] == [plain(step) for step in (0, 0, 1, 2, 3)]


def test_the_scheduler_gives_every_group_its_share():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": PEAK / 4}], lr=PEAK)
    rates = schedule(warmup=2, total=6, steps_per_epoch=1)
    scheduler = rates.scheduler(optimizer)
    for step in range(8):
        expected = [rates(step), rates(step) / 4]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected, rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_layer_decay_falls_from_the_head_to_the_stem():
    task = tiny_task(backbone={**TINY, "depth": 3})
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    rates = {
        names[id(parameter)]: group["lr"]
        for group in parameter_groups(task, 2.0, 0.05, layer_decay=0.5)
        for parameter in group["params"]
    }
    assert rates.keys() == dict(task.named_parameters()).keys()
    assert rates["backbone.head.weight"] == 2
    assert rates["backbone.norm.weight"] == 1  # with the last block, as timm has it
    assert [rates[f"backbone.blocks.{i}.mlp.fc1.weight"] for i in range(3)] == [0.25, 0.5, 1]
    assert rates["backbone.pos_embed"] == rates["backbone.patch_embed.proj.weight"] == 0.125


class TestInATrainer:
    """AdamW as a task configures it, seen from a run."""

    def rates(self, folder, count, task=None, **options):
        """The rate of every optimiser step."""
        task, rates = task or tiny_task(**OPTIONS), []
        step = task.optimizer_step

        def listening(*args, **kwargs):
            rates.append(task.optimizers().param_groups[0]["lr"])
            return step(*args, **kwargs)

        task.optimizer_step = listening
        fit(task, folder, count, **options)
        return rates

    def test_the_rate_changes_per_step(self, tmp_path):
        rates = self.rates(tmp_path, count=32, max_epochs=3)  # 4 steps per epoch
        assert rates == pytest.approx([schedule(1, 3, 4)(step) for step in range(12)])

    def test_accumulated_batches_count_as_one_step(self, tmp_path):
        rates = self.rates(tmp_path, count=64, max_epochs=3, accumulate_grad_batches=4)  # 2 steps per epoch
        assert rates == pytest.approx([schedule(1, 3, 2)(step) for step in range(6)])

    @pytest.mark.parametrize("ends", [{"max_epochs": 5, "max_steps": 3}, {"max_epochs": None, "max_steps": 3}], ids=str)
    def test_the_schedule_ends_with_max_steps(self, tmp_path, ends):
        rates = self.rates(tmp_path, count=16, **ends)
        assert rates == pytest.approx([schedule(1, 1.5, 2)(step) for step in range(3)])

    def test_the_cool_down_stays_at_the_last_rate(self, tmp_path):
        task = tiny_task(**OPTIONS, cooldown_epochs=2)
        rates = self.rates(tmp_path, count=16, task=task, max_epochs=5)
        assert rates == pytest.approx([schedule(1, 3, 2)(step) for step in range(10)])
        assert rates[6:] == [END] * 4

    def test_per_epoch_with_a_lag_as_deit(self, tmp_path):
        task = tiny_task(**OPTIONS, lr_interval="epoch", lr_lag=1)
        rates = self.rates(tmp_path, count=24, task=task, max_epochs=4)
        assert rates == pytest.approx([schedule(1, 4).at(epoch) for epoch in (0, 0, 1, 2) for _ in range(3)])

    @pytest.mark.parametrize("scaled", ["peak", "all"])
    def test_rates_are_scaled_by_the_total_batch(self, tmp_path, scaled):
        task = tiny_task(**OPTIONS, lr_batch=8, lr_scaled=scaled)
        rates = self.rates(tmp_path, count=64, task=task, max_epochs=2, accumulate_grad_batches=4)
        assert total_batch(task.trainer) == 32
        other = 4 if scaled == "all" else 1
        wanted = WarmupCosine(4 * PEAK, other * START, other * END, 1, 2, 2)
        assert rates == pytest.approx([wanted(step) for step in range(4)])

    def test_a_cool_down_as_long_as_the_run_is_refused(self, tmp_path):
        with pytest.raises(UserError, match=r"cooldown_epochs \(3\) must be less than the run's 3 epochs"):
            fit(tiny_task(**OPTIONS, cooldown_epochs=3), tmp_path, max_epochs=3)

    def test_another_total_batch_on_resuming_warns(self, tmp_path):
        runner = fit(tiny_task(**OPTIONS), tmp_path, max_epochs=1)
        runner.save_checkpoint(tmp_path / "a.ckpt")
        assert torch.load(tmp_path / "a.ckpt", weights_only=True)["total_batch"] == 8
        again = trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2)
        with pytest.warns(UserWarning, match="trained with a total batch of 8, this run has 16"):
            again.fit(tiny_task(**OPTIONS), batches(32), ckpt_path=tmp_path / "a.ckpt", weights_only=True)

    def test_adamw_gets_the_groups_and_the_options(self, tmp_path):
        task = tiny_task(weight_decay=0.3, betas=[0.8, 0.95], backbone=TINY)
        runner = fit(task, tmp_path)
        (optimizer,) = runner.optimizers
        assert type(optimizer) is torch.optim.AdamW
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
        assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}
        want = names_of(task, parameter_groups(task, 1, 0.3))
        assert names_of(task, optimizer.param_groups) == want

    def test_a_warm_up_longer_than_the_run_is_cut_with_a_warning(self, tmp_path):
        task = tiny_task(**{**OPTIONS, "warmup_epochs": 9})
        with pytest.warns(UserWarning, match=r"warm-up of 9 epochs is longer than the run \(2 epochs\)"):
            rates = self.rates(tmp_path, count=16, task=task, max_epochs=2)
        assert rates == pytest.approx([schedule(2, 2, 2)(step) for step in range(4)])

    def test_a_run_without_an_end_is_the_users_mistake(self, tmp_path):
        with pytest.raises(linvit.UserError, match=r"needs an end: set trainer\.max_epochs or trainer\.max_steps"):
            fit(tiny_task(), tmp_path, max_epochs=-1)

    @pytest.mark.parametrize("lr_batch", [None, 512])
    def test_an_epoch_without_batches_does_no_harm(self, tmp_path, lr_batch):
        runner = trainer(tmp_path, max_epochs=1, limit_train_batches=0)
        runner.fit(tiny_task(lr_batch=lr_batch), batches(8))
        assert runner.global_step == 0
