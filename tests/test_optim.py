"""Parameter groups and the learning-rate schedule, by themselves and as a task hands them to AdamW."""

import pytest
import torch
from torch import nn

import linvit
from linvit.optim import parameter_groups, warmup_cosine, warmup_cosine_lr
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
    found = names_of(model, parameter_groups(model, 0.05))
    assert found == {
        0.05: [f"{path}tables.other", f"{path}linear.weight"],
        0.0: [f"{path}tables.table", f"{path}linear.bias", f"{path}norm.weight", f"{path}norm.bias"],
    }


def test_the_model_itself_may_name_what_is_spared():
    model = Table()
    assert names_of(model, parameter_groups(model, 0.1)) == {0.1: ["other"], 0.0: ["table"]}


@pytest.mark.parametrize("attention", linvit.list_attentions())
def test_every_parameter_of_a_task_is_in_one_group_once(attention):
    task = tiny_task(attention=attention)
    found = names_of(task, parameter_groups(task, 0.05))
    everything = sorted(name for name, _ in task.named_parameters())
    assert sorted(found[0.05] + found[0.0]) == everything
    assert {"backbone.pos_embed", "backbone.cls_token"} <= set(found[0.0])
    assert {"backbone.head.weight", "backbone.patch_embed.proj.weight"} <= set(found[0.05])
    assert not [name for name in found[0.05] if name.endswith("bias") or ".norm" in name]


def test_frozen_parameters_are_left_out():
    task = tiny_task()
    task.backbone.blocks.requires_grad_(False)
    found = names_of(task, parameter_groups(task, 0.05))
    assert found[0.05] == ["backbone.patch_embed.proj.weight", "backbone.head.weight"]
    assert not [name for name in found[0.0] if ".blocks." in name]


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, START),
        (10, START + (PEAK - START) / 2),
        (20, END + (PEAK - END) * 0.98907380),  # (1 + cos(pi 20/300)) / 2: the cosine is not shifted by the warm-up
        (150, (PEAK + END) / 2),
        (300, END),
        (1000, END),
    ],
)
def test_rate_at_chosen_steps(step, rate):
    assert warmup_cosine_lr(step, 20, 300, PEAK, START, END) == pytest.approx(rate, rel=1e-6)


def test_the_rate_rises_through_the_warm_up_and_falls_after_it():
    rates = [warmup_cosine_lr(step, 20, 300, PEAK, START, END) for step in range(301)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert max(rates) < PEAK


def test_no_warm_up_starts_at_the_peak():
    assert warmup_cosine_lr(0, 0, 300, PEAK, START, END) == PEAK


def test_a_run_that_is_all_warm_up_never_reaches_the_peak():
    rates = [warmup_cosine_lr(step, 4, 4, PEAK, START, END) for step in range(6)]
    assert rates == pytest.approx([START + (PEAK - START) * step / 4 for step in range(4)] + [END, END])


def test_the_scheduler_gives_the_rate_to_every_group():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=PEAK)
    scheduler = warmup_cosine(optimizer, 2, 6, PEAK, START, END)
    for step in range(8):
        expected = warmup_cosine_lr(step, 2, 6, PEAK, START, END)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected] * 2, rel=1e-9)
        optimizer.step()
        scheduler.step()


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
        assert rates == pytest.approx([warmup_cosine_lr(step, 4, 12, PEAK, START, END) for step in range(12)])

    def test_accumulated_batches_count_as_one_step(self, tmp_path):
        rates = self.rates(tmp_path, count=64, max_epochs=3, accumulate_grad_batches=4)  # 2 steps per epoch
        called = [warmup_cosine_lr(step, 2, 6, PEAK, START, END) for step in range(6)]
        assert rates == pytest.approx(called)

    @pytest.mark.parametrize("ends", [{"max_epochs": 5, "max_steps": 3}, {"max_epochs": None, "max_steps": 3}], ids=str)
    def test_the_schedule_ends_with_max_steps(self, tmp_path, ends):
        rates = self.rates(tmp_path, count=16, **ends)
        assert rates == pytest.approx([warmup_cosine_lr(step, 2, 3, PEAK, START, END) for step in range(3)])

    def test_adamw_gets_the_groups_and_the_options(self, tmp_path):
        task = tiny_task(weight_decay=0.3, betas=[0.8, 0.95], backbone=TINY)
        runner = fit(task, tmp_path)
        (optimizer,) = runner.optimizers
        assert type(optimizer) is torch.optim.AdamW
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
        assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}
        want = names_of(task, parameter_groups(task, 0.3))
        assert names_of(task, optimizer.param_groups) == want

    def test_a_warm_up_longer_than_the_run_is_cut_with_a_warning(self, tmp_path):
        task = tiny_task(**{**OPTIONS, "warmup_epochs": 9})
        with pytest.warns(UserWarning, match=r"warm-up of 9 epochs \(18 steps\) is longer than the run \(4 steps\)"):
            rates = self.rates(tmp_path, count=16, task=task, max_epochs=2)
        assert rates == pytest.approx([warmup_cosine_lr(step, 4, 4, PEAK, START, END) for step in range(4)])

    def test_a_run_without_an_end_is_the_users_mistake(self, tmp_path):
        with pytest.raises(linvit.UserError, match=r"needs an end: set trainer\.max_epochs or trainer\.max_steps"):
            fit(tiny_task(), tmp_path, max_epochs=-1)

    def test_an_epoch_without_batches_does_no_harm(self, tmp_path):
        runner = trainer(tmp_path, max_epochs=1, limit_train_batches=0)
        runner.fit(tiny_task(), batches(8))
        assert runner.global_step == 0
