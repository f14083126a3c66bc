"""The rank callback: what it logs of real runs, and that it disturbs none."""

import copy
import math

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy

import linvit
from linvit.analysis import rank
from linvit.analysis.recorder import Recorder
from linvit.callbacks import AttentionRank
from linvit.callbacks.attention import measurement
from linvit.experiments.compare.results import is_rank
from tests.helpers import effective_rank, entropy
from tests.training import HEAD_WIDTH, TINY, Memory, RandomImages, batches, fit, tiny_task, trainer

TOKENS, LAYER = 17, "blocks.0.attn"


class Raises(linvit.Attention):
    """Works in float32 only, as a fused kernel would."""

    def forward(self, q, k, v, grid):
        if q.dtype == torch.float64:
            raise RuntimeError("no kernel for float64")
        return v * (q * k).mean()


class Poisoned(linvit.Attention):
    """Trains, but its first head gives NaN when it is probed."""

    def forward(self, q, k, v, grid):
        weights = (q @ k.mT).softmax(-1)
        if q.dtype == torch.float64:
            weights = torch.cat([weights[:, :1] * torch.nan, weights[:, 1:]], 1)
        return weights @ v


def logged(folder, attention, count=16, **options):
    """What the callback logs while a tiny model with that attention trains."""
    memory = Memory()
    callback = AttentionRank(**{"every_n_steps": 1, "max_share": None, **options})
    task = tiny_task(attention=attention, lr=1e-2, warmup_epochs=0)
    fit(task, folder, count, logger=memory, callbacks=[callback])
    return {
        tag: values
        for tag, values in memory.values.items()
        if tag.endswith(("attn", "min", "mean", "max")) and "/kernel" not in tag and "/convolution" not in tag
    }


def values(found, tag):
    return [value for _, value in found[tag]]


@pytest.mark.parametrize(
    ("attention", "low", "high"),
    [
        ("linear", 1, HEAD_WIDTH),
        ({"name": "enhanced_linear", "head_dim": 5, "heads_ratio": 2, "scales": []}, 1, 5),
        ("focused", HEAD_WIDTH + 1, TOKENS),
    ],
    ids=str,
)
def test_linear_stops_at_the_head_width_and_the_convolution_lifts_it(tmp_path, attention, low, high):
    found = logged(tmp_path, attention)
    assert set(found) == {f"{kind}/{LAYER}" for kind in ("rank", "effective_rank", "entropy")}
    ranks = values(found, f"rank/{LAYER}")
    assert len(ranks) == 2
    assert all(low <= value <= high for value in ranks), ranks
    for one, all_ in zip(values(found, f"effective_rank/{LAYER}"), ranks, strict=True):
        assert 1 <= one <= all_ + 1e-9
    assert all(0 < value <= math.log(TOKENS) + 1e-9 for value in values(found, f"entropy/{LAYER}"))


def test_the_values_are_those_of_the_first_image_before_the_step(tmp_path):
    """Inputs of one step and parameters of the next would make a matrix that nobody ever applied."""
    twin = tiny_task(attention="focused", lr=1e-2, warmup_epochs=0)
    recorder = Recorder(twin)
    twin(RandomImages(16).images[:8])
    matrix = recorder.calls[f"network.{LAYER}"].matrix()  # (h, d, N, N)
    assert matrix.shape == (3, HEAD_WIDTH, TOKENS, TOKENS)
    found = logged(tmp_path, "focused", channel=5)
    for tag, function in (("rank", rank), ("effective_rank", effective_rank), ("entropy", entropy)):
        step, value = found[f"{tag}/{LAYER}"][0]
        assert step == 0
        assert value == pytest.approx(function(matrix[:, 5]).mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("every", "options", "steps"),
    [
        (2, {}, [0, 2, 4]),
        (1, {"accumulate_grad_batches": 3}, [0, 1]),
    ],
    ids=str,
)
def test_cadence_in_optimiser_steps(tmp_path, every, options, steps):
    memory, callback = Memory(), AttentionRank(every, max_share=None)
    fit(tiny_task(), tmp_path, 24, max_epochs=2, logger=memory, callbacks=[callback], **options)
    assert [step for step, _ in memory.values[f"rank/{LAYER}"]] == steps


def test_a_matrix_over_channels_is_logged_by_that_name_and_is_no_rank_of_a_layer(tmp_path):
    memory = Memory()
    task = tiny_task(backbone={**TINY, "depth": 2}, attention=["xca", "linear"])
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(task, tmp_path, logger=[logger, memory], callbacks=[AttentionRank(1, max_share=None)])
    tags = [tag for tag in memory.values if "blocks.0.attn" in tag]
    assert tags == ["rank/blocks.0.attn/channels"]
    assert all(1 <= value <= HEAD_WIDTH for value in values(memory.values, tags[0]))
    assert not is_rank(tags[0])
    assert is_rank("rank/blocks.1.attn")


class TestChannels:
    """A mechanism whose map differs per channel: one, or the mean map."""

    def test_a_channel_that_does_not_exist_does_not_end_the_run(self, tmp_path):
        with pytest.warns(UserWarning, match=str(HEAD_WIDTH)):
            logged(tmp_path, "focused", channel=HEAD_WIDTH)


class TestTrouble:
    """What cannot be looked at is told, and never ends a run."""

    @pytest.fixture
    def register(self, monkeypatch):
        monkeypatch.setattr(linvit.registry.attentions, "_registered", {})
        return linvit.register_attention

    def test_a_diverged_run_is_counted(self, tmp_path):
        memory, task = Memory(), tiny_task(attention="linear")
        with torch.no_grad():
            task.network.blocks[0].attn.qkv.weight.fill_(torch.inf)
        fit(task, tmp_path, logger=memory, callbacks=[AttentionRank(1, max_share=None)])
        assert memory.values[f"nonfinite/{LAYER}"] == [(0, 3), (1, 3)]
        assert f"rank/{LAYER}" not in memory.values

    def test_the_sound_heads_are_still_averaged(self, tmp_path, register):
        register("poisoned")(Poisoned)
        found = logged(tmp_path, "poisoned")
        assert values(found, f"nonfinite/{LAYER}") == [1, 1]
        assert all(1 <= value <= TOKENS for value in values(found, f"rank/{LAYER}"))

    def test_a_mechanism_that_cannot_be_probed_is_told(self, tmp_path, register):
        register("raises")(Raises)
        with pytest.warns(UserWarning, match="no kernel for float64"):
            found = logged(tmp_path, "raises")
        assert found == {}

    def test_a_layer_of_too_many_tokens_is_left_out_and_told(self, tmp_path):
        with pytest.warns(UserWarning, match=f"{LAYER} has {TOKENS} tokens, over max_tokens=16; left out"):
            assert logged(tmp_path / "over", "softmax", max_tokens=16) == {}
        assert logged(tmp_path / "at", "softmax", max_tokens=TOKENS)

    @pytest.mark.filterwarnings("error:AttentionRank")
    def test_thin_factors_give_all_for_any_number_of_tokens(self, tmp_path):
        few, many = (logged(tmp_path / str(limit), "linear", max_tokens=limit) for limit in (TOKENS, 16))
        assert few == many
        assert set(many) == {f"rank/{LAYER}", f"effective_rank/{LAYER}", f"entropy/{LAYER}"}

    def test_a_model_without_attention_is_told(self, tmp_path):
        task = tiny_task(backbone={"name": "timm", "model": "resnet10t"}, img_size=32)
        with pytest.warns(UserWarning, match="has no attention that can be measured: ResNet has no attention"):
            trainer(tmp_path, max_steps=1, max_epochs=1, callbacks=[AttentionRank(1)]).fit(task, batches(8, side=32))

    def test_a_cadence_below_one_is_a_user_error(self):
        with pytest.raises(linvit.UserError, match="every_n_steps must be a whole number at least 1; got 0"):
            AttentionRank(0)


class TestUndisturbed:
    """A run with the callback is the run without it."""

    def test_training_is_bit_identical(self, tmp_path):
        """Of a mechanism that draws numbers and counts its calls."""
        weights = []
        for callbacks in ([], [AttentionRank(1, max_share=None)]):
            task = tiny_task(attention="performer", drop_path_rate=0.3, mixup_alpha=0.5)
            fit(task, tmp_path, 24, max_epochs=2, callbacks=callbacks, logger=Memory())
            weights.append(task.state_dict())
        assert all(torch.equal(one, other) for one, other in zip(*(w.values() for w in weights), strict=True))


class TestSupport:
    """Networks and settings beside the plain one."""

    def test_the_attention_of_a_timm_model_is_measured(self, tmp_path):
        """Its softmax matrices, without a mechanism of linvit in the model that is trained."""
        memory, backbone = Memory(), {"name": "timm", "model": "test_vit"}
        task = tiny_task(backbone=backbone, img_size=160)
        runner = trainer(
            tmp_path, max_steps=1, max_epochs=1, logger=memory, callbacks=[AttentionRank(1, max_share=None)]
        )
        twin = linvit.replace_attention(copy.deepcopy(task.network).eval(), "softmax", 160)
        images = batches(8, side=160).dataset.images
        with Recorder(twin) as recorder:
            twin(images[:1])
        runner.fit(task, batches(8, side=160))
        ranks = {tag: found[0][1] for tag, found in memory.values.items() if tag.startswith("rank/")}
        assert ranks == {f"rank/{name}": rank(call.matrix()).mean().item() for name, call in recorder.calls.items()}
        assert len(ranks) == len(task.network.blocks)
        assert not any("mechanism" in name for name, _ in task.named_modules())

    def test_the_weights_are_those_being_trained_and_not_their_average(self, tmp_path):
        found = []
        for options in ({}, {"ema_decay": 0.9}):
            memory = Memory()
            task = tiny_task(attention="linear", lr=0.1, warmup_epochs=0, **options)
            fit(task, tmp_path, 32, logger=memory, callbacks=[AttentionRank(1, max_share=None)])
            found.append(memory.values[f"effective_rank/{LAYER}"])
        assert found[0] == found[1]
        assert not any("ema" in tag for tag in memory.values)

    def test_a_sharded_strategy_is_told(self, tmp_path, monkeypatch):
        class Sharding(SingleDeviceStrategy):
            """Stands for one that leaves no rank the whole weights."""

        with pytest.warns(UserWarning, match="no rank has the whole weights under Sharding"):
            fit(tiny_task(), tmp_path, logger=Memory(), callbacks=[AttentionRank(1)], strategy=Sharding("cpu"))


class TestBudget:
    """How much time measuring may take."""

    def test_layers_take_turns_where_the_seconds_do_not_suffice_for_all(self, tmp_path, monkeypatch):
        monkeypatch.setattr(measurement, "SECONDS", 1e-9)
        memory, task = Memory(), tiny_task(backbone={**TINY, "depth": 3})
        callback = AttentionRank(1, max_share=None)
        fit(task, tmp_path, 32, logger=memory, callbacks=[callback])
        steps = {f"rank/blocks.{i}.attn": [(i,), (0, 3)][i == 0] for i in range(3)}
        assert {tag: tuple(s for s, _ in memory.values[tag]) for tag in steps} == steps

    def test_what_is_beyond_the_share_is_left_out(self, tmp_path):
        """Of the first measurement, too, all but one layer."""
        memory, task = Memory(), tiny_task(backbone={**TINY, "depth": 3})
        fit(task, tmp_path, 32, logger=memory, callbacks=[AttentionRank(1, max_share=1e-9)])
        ranks = {tag: found for tag, found in memory.values.items() if tag.startswith("rank/")}
        assert list(ranks) == [f"rank/{LAYER}"]
        assert [step for step, _ in ranks[f"rank/{LAYER}"]] == [0]

    def steps(self, folder, monkeypatch, share, **options):
        """The steps at which every layer is measured, of eight, if the speed of the first two decides."""
        monkeypatch.setattr(measurement, "TRIAL", 2)
        monkeypatch.setattr(measurement, "INTERVALS", [2, 4, 1000])
        memory, task = Memory(), tiny_task(backbone={**TINY, "depth": 3})
        callback = AttentionRank(max_share=share)
        runner = fit(task, folder, 64, logger=memory, callbacks=[callback], **options)
        found = {tag: [step for step, _ in values] for tag, values in memory.values.items() if is_rank(tag)}
        assert len(found) == 3
        assert len({*map(tuple, found.values())}) == 1
        return found[f"rank/{LAYER}"], runner

    def test_without_a_cadence_the_speed_decides_and_the_first_step_is_always_measured(self, tmp_path, monkeypatch):
        assert self.steps(tmp_path, monkeypatch, 1e6)[0] == [0, 2, 4, 6]
        assert self.steps(tmp_path, monkeypatch, 1e-9)[0] == [0]

    def test_a_resumed_run_measures_at_the_steps_that_were_chosen(self, tmp_path, monkeypatch):
        _, runner = self.steps(tmp_path, monkeypatch, 1e6, max_steps=3)
        runner.save_checkpoint(tmp_path / "x.ckpt")
        memory, callback = Memory(), AttentionRank(max_share=1e-9)
        again = trainer(tmp_path, max_epochs=2, logger=memory, callbacks=[callback])
        again.fit(tiny_task(backbone={**TINY, "depth": 3}), batches(64), ckpt_path=tmp_path / "x.ckpt")
        assert callback.interval == 2
        assert [step for step, _ in memory.values[f"rank/{LAYER}"]] == [4, 6, 8, 10]
