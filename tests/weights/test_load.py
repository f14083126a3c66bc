"""`load_pretrained`: official files of every family, other grids, classes and attentions, and what is refused."""

import copy
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from timm.models import adapt_input_conv

import linvit
from linvit.attention.ops.functional import grid_from_count, resize_table
from linvit.layers.hosting import OutputGate
from linvit.weights.layouts.backbones import LAYOUTS
from linvit.weights.load import load_pretrained
from tests.helpers import perturb, randn
from tests.weights.files import FAKES


def create(spec, classes=1000, **options):
    torch.manual_seed(0)
    return linvit.create_backbone(spec, num_classes=classes, **options)


def snapshot(model):
    return copy.deepcopy(model.state_dict())


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """family -> its file, made once."""
    folder, made = tmp_path_factory.mktemp("official"), {}

    def file(family):
        if family not in made:
            made[family] = folder / f"{family}.pth"
            FAKES[family].save(FAKES[family].state(), made[family])
        return made[family]

    return file


@pytest.mark.parametrize("family", FAKES)
class TestFamilies:
    """Every family's official checkpoint in its model."""

    def test_every_number_is_loaded(self, family, official):
        fake = FAKES[family]
        model = create(fake.spec)
        fresh = snapshot(model)
        report = load_pretrained(model, official(family))
        assert report.layout == fake.layout
        assert report.fraction == 1
        assert (report.resized, report.initialised, report.missing, report.unexpected) == ({}, {}, {}, [])
        assert set(report.loaded) == {name for name, own in fresh.items() if own.is_floating_point()}
        state = fake.state()
        numbers = sum(tensor.numel() for tensor in state.values())
        assert numbers == sum(own.numel() for own in model.state_dict().values() if own.is_floating_point())
        for name, own in model.state_dict().items():
            if own.is_floating_point() and "norm" not in name:
                assert not torch.equal(own, fresh[name]), name

    def test_one_layout_alone_knows_it(self, family):
        assert [layout.name for layout in LAYOUTS if layout.recognises(FAKES[family].shapes())] == [
            FAKES[family].layout
        ]


@pytest.mark.parametrize("family", ["deit", "flatten_pvt", "cswin", "soft"])
def test_a_state_dict_comes_back(family):
    model, other = create(FAKES[family].spec), create(FAKES[family].spec)
    load_pretrained(model, FAKES[family].state())
    report = load_pretrained(perturb(other), model.state_dict())
    assert_same_state(other.state_dict(), model.state_dict())
    assert report.fraction == 1
    assert not report.unexpected


@pytest.mark.parametrize("family", ["flatten_deit", "pvt", "flatten_swin", "flatten_cswin", "agent_pvt", "inline_swin"])
def test_another_size_resizes_the_tables_and_nothing_else(family):
    model, nominal = (create(FAKES[family].spec, img_size=img_size) for img_size in ((256, 288), 224))
    state = FAKES[family].state()
    load_pretrained(nominal, state)
    report = load_pretrained(model, state)
    found, same = model.state_dict(), nominal.state_dict()
    other = {name for name, own in same.items() if own.shape != found[name].shape}
    assert set(report.resized) == other
    assert report.fraction == 1
    for name, own in found.items():
        if name in other:
            assert 0.005 < own.std() < 0.03
        elif own.is_floating_point():
            assert torch.equal(own, same[name])


@pytest.mark.parametrize(
    ("family", "size", "name", "grid", "mode"),
    [
        ("deit", (224, 320), "pos_embed", (14, 20), "bicubic"),
        ("pvt", (256, 320), "stages.3.pos_embed", (8, 10), "bilinear"),
        ("flatten_pvt", (256, 320), "stages.1.blocks.0.attn.mechanism.positional_encoding", (32, 40), "bicubic"),
        ("flatten_swin", (256, 320), "stages.0.blocks.0.attn.mechanism.positional_encoding", (64, 80), "bicubic"),
    ],
)
def test_the_tables_are_interpolated_as_the_official_code_does(official, family, size, name, grid, mode):
    fake = FAKES[family]
    nominal, model = create(fake.spec), create(fake.spec, img_size=size)
    load_pretrained(nominal, official(family))
    load_pretrained(model, official(family))
    given, own = nominal.state_dict()[name], model.state_dict()[name]
    assert torch.equal(own, resize_table(given, own, grid, partial(grid_from_count, img_size=(1, 1)), mode))


class TestClassifier:
    """The head of other classes."""

    def test_other_classes_begin_at_zero(self, official):
        model = create(FAKES["pvt"].spec, classes=10)
        report = load_pretrained(model, official("pvt"))
        reason = "zero: the file has 1000 classes, the model 10"
        assert report.initialised == {"head.weight": reason, "head.bias": reason}
        assert model.head.weight.eq(0).all()
        assert model.head.bias.eq(0).all()
        assert report.fraction == 1

    def test_a_model_without_one(self, official):
        report = load_pretrained(create(FAKES["pvt"].spec, classes=0), official("pvt"))
        assert report.unexpected == ["head.weight", "head.bias"]
        assert report.fraction == 1

    def test_a_file_without_one(self):
        state = {name: tensor for name, tensor in FAKES["pvt"].state().items() if not name.startswith("head")}
        model = create(FAKES["pvt"].spec, classes=10)
        before = snapshot(model)
        report = load_pretrained(model, state)
        assert set(report.initialised) == {"head.weight", "head.bias"}
        assert torch.equal(model.head.weight, before["head.weight"])

    def test_distilled_deit(self):
        spec = {**FAKES["deit"].spec, "distilled": True}
        state = perturb(create(spec)).state_dict()
        report = load_pretrained(model := create(spec, classes=10), state)
        assert set(report.initialised) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}
        assert report.missing == {}
        report = load_pretrained(create(FAKES["deit"].spec), state)
        assert set(report.resized) == {"pos_embed"}
        assert set(report.unexpected) == {"dist_token", "head_dist.weight", "head_dist.bias"}
        assert model.head_dist.weight.eq(0).all()

    @pytest.mark.parametrize(
        "model", ["resnet18", pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.slow)]
    )
    def test_of_timms_models(self, model):
        spec = {"name": "timm", "model": model}
        report = load_pretrained(create(spec, classes=3), create(spec, classes=5).state_dict())
        assert len(report.initialised) == 2
        assert report.fraction == 1


WIDER = ("enhanced_linear", "vittt")  # their outputs are wider than their inputs


class TestAttention:
    """Official softmax weights under another attention, and the other way round."""

    @pytest.mark.parametrize("attention", linvit.list_attentions())
    @pytest.mark.parametrize("family", ["deit", pytest.param("swin", marks=pytest.mark.slow)])
    def test_the_projections_are_kept(self, official, family, attention):
        model = create(FAKES[family].spec, attention=attention, img_size=64 if family == "deit" else 224)
        before = snapshot(model)
        report = load_pretrained(model, official(family), min_fraction=0.8)
        own = {name for name in before if ".mechanism." in name}
        assert {name for name in report.initialised if ".mechanism." in name} == own - {
            name for name in own if not before[name].is_floating_point()
        }
        for name in own:
            assert torch.equal(model.state_dict()[name], before[name])
        assert not report.missing
        load_pretrained(softmax := create(FAKES[family].spec), official(family))
        outputs = {name for name in before if name.endswith("attn.proj.weight")}
        assert {name for name in report.resized if name in outputs} == (outputs if attention in WIDER else set())
        for name in outputs:  # the first columns of each head
            host = model.get_submodule(name.removesuffix(".proj.weight"))
            heads, width = host.mechanism.num_heads, host.mechanism.head_dim
            columns = host.proj.weight.unflatten(1, (host.mechanism.out_heads, -1))[:, :heads, :width].flatten(1)
            assert torch.equal(columns, softmax.state_dict()[name])
        layers = [name for name in before if name.endswith("qkv.weight")]
        assert layers
        assert set(layers) <= set(report.loaded)
        for gate in (module for module in model.modules() if isinstance(module, OutputGate)):
            x = randn(2, 9, gate.in_features, dtype=torch.float32)
            torch.testing.assert_close(gate(x, x), x)  # open

    def test_focused_into_softmax(self, official):
        report = load_pretrained(create(FAKES["flatten_pvt"].spec, attention="softmax"), official("flatten_pvt"))
        assert report.fraction == 1
        assert all(".mechanism." in name for name in report.unexpected)

    def test_a_part_of_a_mechanism_is_missing(self):
        state = FAKES["flatten_deit"].state()
        del state["blocks.0.attn.scale"], state["blocks.1.attn.positional_encoding"]
        report = load_pretrained(create(FAKES["flatten_deit"].spec), state, min_fraction=0.5)
        assert set(report.missing) == {
            "blocks.0.attn.mechanism.scale",
            "blocks.1.attn.mechanism.positional_encoding",
        }
        assert report.fraction < 1


class TestRefusal:
    """What does not fit leaves the model as it was."""

    def refused(self, model, source, **options):
        before = snapshot(model)
        with pytest.raises(linvit.UserError) as error:
            load_pretrained(model, source, **options)
        assert_same_state(model.state_dict(), before)
        return str(error.value)

    def test_another_family(self, official):
        text = self.refused(create(FAKES["pvt"].spec), official("swin"))
        assert "less than min_fraction = 90%; nothing was changed" in text
        assert "it is of a model with the names of swin. Name the backbone that it belongs to, or lower" in text

    def test_a_run_of_another_model(self, tmp_path):
        content = {"hyper_parameters": {"backbone": {"name": "pvt_tiny"}, "attention": "focused"}}
        torch.save({**content, "state_dict": {"network.x": torch.zeros(1)}}, tmp_path / "x.ckpt")
        text = self.refused(create(FAKES["deit"].spec), tmp_path / "x.ckpt")
        assert "it is of backbone pvt_tiny, attention focused. Name the backbone" in text

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite(self, value):
        state = FAKES["deit"].state()
        state["blocks.1.mlp.fc1.weight"][0, 0] = value
        assert "has non-finite weights; nothing was changed: 'blocks.1.mlp.fc1.weight'" in self.refused(
            create(FAKES["deit"].spec), state
        )

    def test_unknown_names(self):
        text = self.refused(create(FAKES["pvt"].spec), {"encoder.layer.0.w": torch.ones(3), "x": torch.ones(2)})
        assert ", ".join(layout.name for layout in LAYOUTS) in text
        assert "They begin encoder.layer.0.w, x" in text

    def test_the_fraction_is_of_numbers(self):
        state = FAKES["deit"].state()
        model = create(FAKES["deit"].spec)
        total = sum(p.numel() for name, p in model.state_dict().items() if not name.startswith("head"))
        cut = {name: tensor for name, tensor in state.items() if not name.startswith("blocks.1.mlp")}
        lost = sum(tensor.numel() for name, tensor in state.items() if name not in cut)
        fraction = 1 - lost / total
        report = load_pretrained(model, cut, min_fraction=fraction - 1e-6)
        assert report.fraction == pytest.approx(fraction)
        assert list(report.missing) == [name for name in model.state_dict() if name.startswith("blocks.1.mlp")]
        assert f"{fraction:.1%}" in self.refused(model, cut, min_fraction=fraction + 1e-6)

    @pytest.mark.parametrize("channels", [1, 4, 13])
    def test_other_channels_of_the_image(self, channels):
        """The first convolution is fitted to them as timm fits it."""
        model, name = create(FAKES["pvt"].spec, in_chans=channels), "stages.0.embed.proj.weight"
        state = FAKES["pvt"].state()
        (stem,) = (tensor for tensor in state.values() if tensor.shape == (16, 3, 4, 4))
        report = load_pretrained(model, state)
        assert report.resized[name] == f"16x3x4x4 to 16x{channels}x4x4"
        assert not report.missing
        torch.testing.assert_close(model.state_dict()[name], adapt_input_conv(channels, stem), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.ones(3, 3, 3)], ids=lambda t: str(t.shape))
    @pytest.mark.parametrize("name", ["attn.kv.weight", "attn.q.bias", "mlp.fc1.weight"])
    def test_tensors_of_odd_shapes(self, name, tensor):
        state = {**FAKES["pvt"].state(), f"block3.0.{name}": tensor, "head.weight": tensor, "pos_embed1": tensor}
        report = load_pretrained(create(FAKES["pvt"].spec), state, min_fraction=0.1)
        assert {"stages.0.pos_embed", "head.weight"} <= report.missing.keys()
        assert "in the file" in str(report)


def test_precision_follows_the_model():
    state = {name: tensor.half() for name, tensor in FAKES["deit"].state().items()}
    model = create(FAKES["deit"].spec)
    load_pretrained(model, state)
    assert {own.dtype for own in model.state_dict().values()} == {torch.float32}
    assert torch.equal(model.head.weight, state["head.weight"].float())


def test_the_file_does_not_stay_tied_to_the_model(tmp_path):
    """Nor is it changed by training, though large files are mapped into memory."""
    path = tmp_path / "x.pth"
    torch.save(FAKES["deit"].state(), path)
    before = path.read_bytes()
    model = create(FAKES["deit"].spec)
    load_pretrained(model, path)
    perturb(model)
    assert path.read_bytes() == before


def test_batch_norms_keep_their_statistics(official):
    model = create(FAKES["soft"].spec)
    load_pretrained(model, official("soft"))
    statistics = {name: own for name, own in model.state_dict().items() if "running" in name}
    assert statistics
    fresh = create(FAKES["soft"].spec).state_dict()
    assert not any(torch.equal(own, fresh[name]) for name, own in statistics.items())


def test_our_own_safetensors(tmp_path):
    model, other = perturb(create(FAKES["deit"].spec)), create(FAKES["deit"].spec)
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    assert load_pretrained(other, tmp_path / "x.safetensors").fraction == 1
    assert_same_state(model.state_dict(), other.state_dict())


def test_the_report_reads_well(official):
    model = create(FAKES["flatten_pvt"].spec, classes=10, img_size=256)
    report = load_pretrained(model, official("flatten_pvt"))
    first, *lines = str(report).splitlines()
    assert first.startswith(f"weights from '{official('flatten_pvt')}': pvt names, from model (beside it: optimizer,")
    assert first.endswith("config), 100.0% of the backbone")
    assert [line.split()[0] for line in lines] == ["loaded", "resized", "initialised", "missing", "unexpected"]
    assert [int(line.split()[1]) for line in lines] == [
        len(report.loaded),
        len(report.resized),
        len(report.initialised),
        len(report.missing),
        len(report.unexpected),
    ]
    assert "(1x3136x16 to 1x4096x16)" in lines[1]
    assert max(map(len, lines)) < 400


def test_numbers_are_in_the_right_place(official):
    model = create(FAKES["deit"].spec)
    load_pretrained(model, official("deit"))
    assert_same_state(model.state_dict(), FAKES["deit"].state())


@pytest.mark.parametrize("family", ["pola_pvt", "pola_swin"])
def test_the_rows_of_a_gate_are_the_last_of_what_they_are_joined_with(official, family):
    model, state = create(FAKES[family].spec), FAKES[family].state()
    load_pretrained(model, official(family))
    layer = model.stages[0].blocks[0].attn
    dim = layer.gate.in_features
    if family == "pola_pvt":
        start, rows = (
            "block1.0.attn",
            {"qg": [layer.qkv.weight[:dim], layer.gate.weight], "kv": [layer.qkv.weight[dim:]]},
        )
    else:
        start, rows = "layers.0.blocks.0.attn", {"qkvg": [layer.qkv.weight, layer.gate.weight]}
    for name, parts in rows.items():
        assert torch.equal(torch.cat(parts), state[f"{start}.{name}.weight"])
