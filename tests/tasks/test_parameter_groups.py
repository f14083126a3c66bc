"""Parameter groups by themselves, and with the schedule as a task hands them to AdamW."""

import pytest
import timm
import timm.optim
import torch
from lightning.pytorch import Callback
from torch import nn

import linvit
from linvit import UserError
from linvit.callbacks import SaveCheckpoints
from linvit.tasks.optimisation import total_batch_size
from linvit.tasks.parameter_groups import adamw, look_ahead, parameter_groups
from linvit.tasks.schedules import WarmupCosine
from tests.tasks.test_schedules import END, PEAK, START, schedule
from tests.training import TINY, KeepFirst, batches, fit, tiny_task, trainer

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


@pytest.mark.parametrize("depth", [0, 2])
def test_vectors_and_what_a_module_names_are_spared_at_any_depth(depth):
    model, path = nn.ModuleDict({"tables": Table(), "linear": nn.Linear(3, 2), "norm": nn.BatchNorm2d(4)}), ""
    for _ in range(depth):
        model, path = nn.ModuleDict({"inner": model}), f"inner.{path}"
    found = names_of(model, parameter_groups(model, 1, 0.05))
    assert found == {
        0.05: [f"{path}tables.other", f"{path}linear.weight"],
        0.0: [f"{path}tables.table", f"{path}linear.bias", f"{path}norm.weight", f"{path}norm.bias"],
    }


@pytest.mark.parametrize("attention", ["focused", "performer", "mhla", "vittt"])  # the kinds of parameters
def test_every_parameter_of_a_task_is_in_one_group_once(attention):
    task = tiny_task(attention=attention)
    found = names_of(task, parameter_groups(task, 1, 0.05))
    everything = sorted(name for name, _ in task.named_parameters())
    assert sorted(found[0.05] + found[0.0]) == everything
    assert {"network.pos_embed", "network.cls_token"} <= set(found[0.0])
    assert {"network.head.weight", "network.patch_embed.proj.weight"} <= set(found[0.05])
    assert not [name for name in found[0.05] if task.get_parameter(name).ndim == 1 or ".norm" in name]


def test_fragments_of_names_decide_alone_what_is_not_decayed():
    """As mmcv's optimiser constructor reads them: vectors are decayed where their names do not match."""
    model = nn.ModuleDict(
        {"tables": Table(), "linear": nn.Linear(3, 2), "norm1": nn.LayerNorm(4), "bn": nn.BatchNorm2d(4)}
    )
    every = [name for name, _ in model.named_parameters()]
    found = names_of(model, parameter_groups(model, 1, 0.05, no_decay=["norm", "table"]))
    spared = [name for name in every if name.startswith(("tables.", "norm1"))]
    assert found == {0.05: [name for name in every if name not in spared], 0.0: spared}
    assert names_of(model, parameter_groups(model, 1, 0.05, no_decay=[])) == {0.05: every}


def rates_of(model, **options):
    """Name of a parameter -> its peak, where the last layer's is 2."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 2.0, 0.05, **options)
    return {names[id(parameter)]: group["lr"] for group in groups for parameter in group["params"]}


def test_layer_decay_falls_from_the_head_to_the_stem():
    task = tiny_task(backbone={**TINY, "depth": 3})
    rates = rates_of(task, layer_decay=0.5)
    assert rates.keys() == dict(task.named_parameters()).keys()
    assert rates["network.head.weight"] == 2
    assert rates["network.norm.weight"] == 1  # with the last block, as timm has it
    assert [rates[f"network.blocks.{i}.mlp.fc1.weight"] for i in range(3)] == [0.25, 0.5, 1]
    assert rates["network.pos_embed"] == rates["network.patch_embed.proj.weight"] == 0.125


@pytest.mark.parametrize("model", ["vit_small_r26_s32_224"])
def test_layer_decay_is_timms(model):
    """Of a transformer whose stem is a network with layers, too."""
    with torch.device("meta"):
        network = timm.create_model(model)
    theirs = timm.optim.param_groups_layer_decay(network, 0.05, network.no_weight_decay(), layer_decay=0.7)
    expected = {id(parameter): 2 * group["lr_scale"] for group in theirs for parameter in group["params"]}
    found = rates_of(network, layer_decay=0.7)
    assert found == pytest.approx({name: expected[id(each)] for name, each in network.named_parameters()})


def test_layer_decay_of_a_network_without_layers_is_refused():
    with pytest.raises(UserError, match=r"layer_decay needs a network .* group_matcher\(\), and this one does not"):
        rates_of(tiny_task(backbone={"name": "timm", "model": "pit_ti_224"}, img_size=224), layer_decay=0.5)


def test_the_body_has_a_share_of_the_classifier_s_rate():
    task, layer_decay = tiny_task(), 0.5
    plain, scaled = (rates_of(task, layer_decay=layer_decay, backbone_lr_scale=scale) for scale in (1.0, 0.05))
    heads = {"network.head.weight", "network.head.bias"}
    assert {name for name in plain if plain[name] == scaled[name]} == heads
    assert all(scaled[name] == pytest.approx(0.05 * plain[name]) for name in plain.keys() - heads)


def test_look_ahead():
    """At each second step from the first on, weights go half-way back; after a load, too."""
    weights, unused = ([nn.Parameter(torch.full((3,), x, dtype=torch.float64))] for x in (1.0, 2.0))
    bare, ahead = ([nn.Parameter(w.detach().clone()) for w in weights + unused] for _ in range(2))

    def made(parameters):
        return adamw([{"params": parameters}], 0.1, (0.9, 0.999), fused=True)

    plain, wrapped = made(bare), made(ahead)
    look_ahead(wrapped, 2)
    slow = None
    for step in range(5):
        for optimizer, (weight, _) in ((plain, bare), (wrapped, ahead)):
            weight.grad = torch.tensor([1.0, -2.0, float(step)], dtype=torch.float64)
            optimizer.step()
        if step % 2 == 0:
            slow = bare[0].detach().clone() if slow is None else (slow + bare[0].detach()) / 2
            bare[0].data.copy_(slow)
        assert torch.equal(bare[0], ahead[0])
        kept, wrapped = wrapped.state_dict(), made(ahead)
        look_ahead(wrapped, 2)
        wrapped.load_state_dict(kept)
    assert torch.equal(ahead[1], unused[0])


@pytest.mark.parametrize("fused", [True, False])
def test_look_ahead_leaves_out_what_is_skipped(fused):
    """The guard of finite gradients marks a step of fused AdamW, and takes the gradients of others."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = adamw([{"params": [weight]}], 0.1, (0.9, 0.999), fused=fused)
    look_ahead(optimizer, 1)
    for step in range(3):
        if fused:
            optimizer.found_inf = torch.tensor(float(step == 1))
        weight.grad = None if step == 1 and not fused else torch.ones(3)
        before = weight.detach().clone(), optimizer.state[weight].get("slow", torch.zeros(3)).clone()
        optimizer.step()
        same = torch.equal(weight, before[0]), torch.equal(optimizer.state[weight]["slow"], before[1])
        assert same == (step == 1, step == 1)


def test_look_ahead_in_a_run_that_accumulates_averages_and_resumes(tmp_path, monkeypatch):
    before, after = [], []

    def watched(optimizer, steps):
        (weight, *_), *_ = (group["params"] for group in optimizer.param_groups)
        optimizer.register_step_post_hook(lambda *_: before.append(weight.detach().clone()))
        look_ahead(optimizer, steps)
        optimizer.register_step_post_hook(lambda *_: after.append(weight.detach().clone()))

    monkeypatch.setattr("linvit.tasks.base.look_ahead", watched)
    found = []
    for folder in (tmp_path / "whole", tmp_path / "resumed"):
        task = tiny_task(lookahead=2, ema_decay=0.5)
        options = {
            "accumulate_grad_batches": 2,
            "enable_checkpointing": True,
            "callbacks": [SaveCheckpoints(None), KeepFirst()],
        }
        runner = trainer(folder, max_epochs=2, **options)
        before.clear()
        after.clear()
        last = None if not found else tmp_path / "whole" / "checkpoints" / "first.ckpt"
        runner.fit(task, batches(48), ckpt_path=last)  # 3 steps per epoch
        found.append({name: value.clone() for name, value in task.state_dict().items()})
        assert {group["lookahead_step"] for group in runner.optimizers[0].param_groups} == {6} == {runner.global_step}
        if last is None:
            slow = before[0]
            for step, (fast, kept) in enumerate(zip(before, after, strict=True)):
                slow = slow.lerp(fast, 0.5) if step % 2 == 0 else slow
                assert torch.equal(kept, fast if step % 2 else slow)
            (name,) = [name for name, value in task.network.named_parameters() if torch.equal(value, after[-1])]
            average = dict(tiny_task().network.named_parameters())[name].detach()
            for kept in after:
                average = 0.5 * average + 0.5 * kept
            assert torch.allclose(dict(task.ema.network.named_parameters())[name], average)
    whole, resumed = found
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


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

    def test_accumulated_batches_count_as_one_step(self, tmp_path):
        rates = self.rates(tmp_path, count=64, max_epochs=3, accumulate_grad_batches=4)  # 2 steps per epoch
        assert rates == pytest.approx([schedule(1, 3, 2)(step) for step in range(6)])

    def test_the_schedule_ends_with_max_steps(self, tmp_path):
        rates = self.rates(tmp_path, count=16, max_epochs=5, max_steps=3)
        assert rates == pytest.approx([schedule(1, 1.5, 2)(step) for step in range(3)])

    def test_a_polynomial_decay_with_a_warm_up_in_steps(self, tmp_path):
        task = tiny_task(**OPTIONS, schedule="poly", poly_power=0.9, warmup_steps=3)
        rates = self.rates(tmp_path, count=32, task=task, max_epochs=None, max_steps=10)  # 4 steps per epoch
        decayed = [END + (PEAK - END) * (1 - step / 10) ** 0.9 for step in range(10)]
        warming = [1 - (1 - step / 3) * (1 - START / PEAK) for step in range(3)] + [1] * 7
        assert rates == pytest.approx([rate * factor for rate, factor in zip(decayed, warming, strict=True)])

    def test_the_cool_down_stays_at_the_last_rate(self, tmp_path):
        task = tiny_task(**OPTIONS, cooldown_epochs=2)
        rates = self.rates(tmp_path, count=16, task=task, max_epochs=5)
        assert rates == pytest.approx([schedule(1, 3, 2)(step) for step in range(10)])
        assert rates[6:] == [END] * 4

    def test_the_body_s_rate_has_a_peak_of_its_own_and_the_ends_of_all(self, tmp_path):
        task, found = tiny_task(**OPTIONS, backbone_lr_scale=0.05), []
        step = task.optimizer_step

        def listening(*args, **kwargs):
            groups = task.optimizers().param_groups
            found.append([group["lr"] for group in groups])
            assert [group["peak_scale"] for group in groups] == [1, 1, 0.05, 0.05]
            return step(*args, **kwargs)

        task.optimizer_step = listening
        fit(task, tmp_path, 32, max_epochs=3)
        head, body = schedule(1, 3, 4), WarmupCosine(0.05 * PEAK, START, END, 1, 3, 4)
        assert len(found) == 12
        for number, rates in enumerate(found):
            assert rates == pytest.approx([head(number)] * 2 + [body(number)] * 2)

    def test_per_epoch_with_a_lag_as_deit(self, tmp_path):
        task = tiny_task(**OPTIONS, lr_interval="epoch", lr_delay=1)
        rates = self.rates(tmp_path, count=24, task=task, max_epochs=4)
        assert rates == pytest.approx([schedule(1, 4).at(epoch) for epoch in (0, 0, 1, 2) for _ in range(3)])

    @pytest.mark.parametrize("scaled", ["peak", "all"])
    def test_rates_are_scaled_by_the_total_batch(self, tmp_path, scaled):
        task = tiny_task(**OPTIONS, lr_base_batch_size=8, lr_scaling=scaled)
        rates = self.rates(tmp_path, count=64, task=task, max_epochs=2, accumulate_grad_batches=4)
        assert total_batch_size(task.trainer) == 32
        other = 4 if scaled == "all" else 1
        wanted = WarmupCosine(4 * PEAK, other * START, other * END, 1, 2, 2)
        assert rates == pytest.approx([wanted(step) for step in range(4)])

    def test_a_cool_down_as_long_as_the_run_is_refused(self, tmp_path):
        with pytest.raises(UserError, match=r"cooldown_epochs \(3\) must be less than the run's 3 epochs"):
            fit(tiny_task(**OPTIONS, cooldown_epochs=3), tmp_path, max_epochs=3)

    @pytest.mark.parametrize(
        ("warmup", "cooldown", "epochs", "words"),
        [
            (9, 0, 2, "warm-up of 9 epochs leaves no time for the decay in a run of 2 epochs, 0 of them cool-down"),
            (3, 1, 3, r"in a run of 3 epochs, 1 of them cool-down\. Lower --model\.warmup_epochs"),
        ],
        ids=str,
    )
    def test_a_warm_up_that_leaves_no_cosine_is_cut_with_a_warning(self, tmp_path, warmup, cooldown, epochs, words):
        task = tiny_task(**{**OPTIONS, "warmup_epochs": warmup, "cooldown_epochs": cooldown})
        with pytest.warns(UserWarning, match=words):
            rates = self.rates(tmp_path, count=16, task=task, max_epochs=epochs)
        assert rates == pytest.approx([schedule(2, 2, 2)(step) for step in range(2 * epochs)])
        assert rates[4:] == [END] * 2 * cooldown

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"min_lr": 2 * PEAK}, r"min_lr \(0\.002 in this run\) is above the peak of .* rises in the decay"),
            ({"warmup_lr": 2 * PEAK}, r"warmup_lr \(0\.002 in this run\) is above the peak of .* falls in the warm-up"),
        ],
        ids=str,
    )
    def test_ends_above_the_peak_get_a_warning(self, tmp_path, options, words):
        with pytest.warns(UserWarning, match=words):
            self.rates(tmp_path, count=16, task=tiny_task(**OPTIONS | options), max_epochs=2)

    def test_a_run_without_an_end_is_the_users_mistake(self, tmp_path):
        with pytest.raises(
            linvit.UserError, match=r"needs an end to decay to: set trainer\.max_epochs or trainer\.max_steps"
        ):
            fit(tiny_task(), tmp_path, max_epochs=-1)

    def test_an_epoch_without_batches_does_no_harm(self, tmp_path):
        runner = trainer(tmp_path, max_epochs=1, limit_train_batches=0)
        runner.fit(tiny_task(lr_base_batch_size=512), batches(8))
        assert runner.global_step == 0


class Watching(Callback):
    """Keeps the rates of every optimiser step, and the checkpoint after an epoch."""

    def __init__(self, file=None, after=None):
        self.rates, self.file, self.after = [], file, after

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch + 1 == self.after:
            trainer.save_checkpoint(self.file)


@pytest.mark.parametrize("layer_decay", [None, 0.5])
class TestGoingOn:
    """The rates of a run of 32 images that is resumed after two epochs of 4 steps."""

    @pytest.fixture
    def task(self, layer_decay):
        """The same task each time."""
        options = {**OPTIONS, "lr_base_batch_size": 8, "lr_scaling": "all", "layer_decay": layer_decay}
        return lambda: tiny_task(**options, backbone={**TINY, "depth": 2})

    def run(self, task, folder, checkpoint=None, after=None, batch_size=8, **options):
        watching = Watching(folder / "x.ckpt", after)
        runner = trainer(folder, callbacks=[watching], **options)
        runner.fit(task, batches(32, batch_size), ckpt_path=checkpoint, weights_only=True)
        return runner, watching.rates

    def wanted(self, task, rates, steps):
        """What a schedule says, for every group."""
        scales = [group["lr"] for group in parameter_groups(task, 1.0, 0.05, task.hparams["layer_decay"])]
        assert len(set(scales)) == (1 if task.hparams["layer_decay"] is None else 4)
        return [pytest.approx([rates(step) * scale for scale in scales], rel=1e-9) for step in steps]

    def test_with_the_same_batch_it_is_as_if_it_had_never_ended(self, tmp_path, task):
        straight, going_on = task(), task()
        _, rates = self.run(straight, tmp_path, after=2, max_epochs=4)
        _, rest = self.run(going_on, tmp_path, tmp_path / "x.ckpt", max_epochs=4)
        assert rest == rates[8:]
        for name, weight in straight.state_dict().items():
            assert torch.equal(weight, going_on.state_dict()[name]), name

    @pytest.mark.parametrize("change", [{"batch_size": 16}], ids=str)
    def test_with_another_batch_the_rates_are_its_own_from_the_same_epoch_on(self, tmp_path, task, change):
        self.run(task(), tmp_path, after=2, max_epochs=6)
        again = task()
        runner, rates = self.run(again, tmp_path, tmp_path / "x.ckpt", max_epochs=6, **change)
        larger = WarmupCosine(2 * PEAK, 2 * START, 2 * END, 1, 6, 2)
        assert rates == self.wanted(again, larger, range(4, 12))
        (optimizer,) = runner.optimizers
        runner.save_checkpoint(tmp_path / "y.ckpt")
        saved = torch.load(tmp_path / "y.ckpt", weights_only=True)
        peaks = [2 * group["lr"] for group in parameter_groups(again, PEAK, 0.05, again.hparams["layer_decay"])]
        assert [group["initial_lr"] for group in optimizer.param_groups] == pytest.approx(peaks)
        assert saved["lr_schedulers"][0]["base_lrs"] == pytest.approx(peaks)
        assert saved["total_batch"] == 16
        _, rates = self.run(task(), tmp_path, tmp_path / "y.ckpt", max_epochs=8, **change)  # and on from there
        longer = WarmupCosine(2 * PEAK, 2 * START, 2 * END, 1, 8, 2)
        assert rates == self.wanted(again, longer, range(12, 16))

    def test_a_run_that_its_steps_end_keeps_its_step(self, tmp_path, task):
        self.run(task(), tmp_path, after=2, max_epochs=-1, max_steps=12)
        again = task()
        _, rates = self.run(again, tmp_path, tmp_path / "x.ckpt", max_epochs=-1, max_steps=12, batch_size=16)
        assert rates == self.wanted(again, WarmupCosine(2 * PEAK, 2 * START, 2 * END, 1, 6, 2), range(8, 12))
