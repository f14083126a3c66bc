"""The Triton kernels of linear attention, without a GPU: in Triton's interpreter, and their choice."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from subprocess import run
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import linvit
from linvit.attention.base import Grid, Packed, create_attention
from linvit.attention.kernels import Formula, choice, linear_attention
from linvit.attention.kernels.choice import set_attention_kernel
from linvit.errors import UserError
from linvit.registry import attention_kernels, attentions
from tests.attention.kernel_cases import CASES, MECHANISMS, on_a_device, plain

TOLERANCE = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 1e-2}
PACKS = [
    Packed(torch.randint(8, 57, (count, 2), generator=torch.Generator().manual_seed(count)).tolist(), num_prefix=prefix)
    for count, prefix in ((80, 0), (90, 1), (101, 0))
]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def found_by_the_interpreter(*options):
    """What it found, by the name of the case. Triton decides when it is imported how it runs programs."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.attention.kernel_cases", *options]
    done = run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    if "lambda self: int(self.handle.data))" in done.stderr:
        pytest.skip("Triton's interpreter is older than numpy 2.4, which takes no array (1,) for a number")
    assert not done.returncode, done.stderr[-3000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def interpreted():
    return found_by_the_interpreter()


@needs_triton
@pytest.mark.slow
def test_one_compiled_graph_computes_the_same():
    assert all(error < 3e-6 for error in found_by_the_interpreter("--compiled")["compiled"]["errors"])


@needs_triton
@pytest.mark.parametrize(
    "name", [*CASES, *MECHANISMS, *(f"{name} packed" for name in MECHANISMS), "leaks", "nan", "far apart"]
)
def test_values_and_gradients_are_those_of_float64(interpreted, name):
    dtype = next((dtype for dtype in name.split() if dtype in TOLERANCE), "float32")
    assert all(error < TOLERANCE[dtype] for error in interpreted[name]["errors"])  # NaN is not


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_launches(interpreted, name):
    forward, backward = interpreted[name]["launches"]
    assert forward <= (3 if "focused" in name else 2)
    assert backward <= (5 if "focused" in name else 3)


@pytest.fixture
def launches(monkeypatch):
    """The launches of the kernels on CPU tensors, of which none runs."""
    from linvit.attention.kernels import linear

    monkeypatch.setattr("linvit.attention.kernels.formula.INTERPRETED", True)
    monkeypatch.setattr(linear, "launch", launch := mock.Mock())
    return launch.call_args_list


@needs_triton
@pytest.mark.parametrize(
    ("phi", "batch", "tokens"),
    [
        *(("elu", *size) for size in [(64, 3136), (1, 3136), (1, 12544), (64, 196), (64, 784), (4096, 49)]),
        *(("focused", *size) for size in [(64, 3136), (256, 196), (4096, 49)]),
    ],
)
def test_bytes_of_the_forward_pass(launches, phi, batch, tokens):
    """At most 1.5 times those of q, k, v and the output, if each launch moves each of its tensors once."""
    q, k, v = (torch.empty(batch, tokens, 3, 32, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    linear_attention(q, k, v, Formula(phi, power=3.0))
    tensors = [{id(x): x for x in tree_leaves(call.args) if isinstance(x, torch.Tensor)} for call in launches]
    assert 4 * q.nbytes < sum(x.nbytes for given in tensors for x in given.values()) < 1.5 * 4 * q.nbytes


@needs_triton
@pytest.mark.parametrize("phi", ["elu", "focused"])
def test_many_windows_fit_into_a_grid(launches, phi):
    """Of which CUDA allows 65,535 programs along all axes but the first."""
    q = torch.zeros(30_000, 3, 1, 8, requires_grad=True)
    linear_attention(q, q, q, Formula(phi, all_heads=False)).backward(torch.zeros_like(q))
    grids = [call.args[1] for call in launches]
    assert len(grids) == 2
    assert all(max(grid[1:]) < 2**16 <= grid[0] for grid in grids)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [False, True])
def test_a_gpu_computes_what_float64_does(name, dtype, packed):
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert all(error < tolerance for error in on_a_device("cuda", name, dtype, packed))


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("phi", ["elu", "focused"])
def test_a_gpu_compiles_nothing_for_packs_of_other_sizes(monkeypatch, phi):
    import triton

    hooks = []
    for packed in PACKS:
        hooks.append(mock.Mock(return_value=False))
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hooks[-1])  # which each compilation calls
        q, k, v = (torch.randn(1, packed.num_queries, 3, 32, device="cuda").transpose(1, 2) for _ in range(3))
        linear_attention(q.requires_grad_(), k, v, Formula(phi, power=3.0), packed).square().sum().backward()
    assert not any(hook.called for hook in hooks[1:])


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["linear", "efficient"])  # the others have tables of positions
def test_a_token_of_a_pack_takes_at_most_a_ninth_longer_than_one_of_padded_images(name):
    """Device time, forward and backward, on an idle GPU: a goal that was not measured yet."""
    assert pytest.importorskip("benchmarks.gpu").pack_speed(name) > 0.9


@needs_triton
@pytest.mark.parametrize("case", ["elu, rotary, difference", "softmax", "focused"])
@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        (90, (64, 3136)),  # in seconds; the others are compiled from the same source
        *(
            pytest.param(architecture, size, marks=pytest.mark.slow)
            for architecture, size in [
                *((a, (64, 3136)) for a in (80, 100)),
                *((a, size) for a in (80, 90, 100) for size in ((4096, 49), (PACKS[0], PACKS[0].num_queries))),
            ]
        ),
    ],
)
def test_programs_are_compiled_for_a_gpu(case, architecture, size):
    """Which takes less of Python than the interpreter does; without a GPU, by Triton's own assembler."""
    kernels = pytest.importorskip("benchmarks.kernels")
    programs = [one for each in kernels.step(case, *size, 3, 32, torch.bfloat16) for one in each]
    for program in (one for one in programs if one[0] is not torch.sum):
        registers, spilled, _ = map(int, kernels.usage(program, architecture).split(" / "))
        assert 0 < registers < 256
        assert spilled < 200


@needs_triton
@pytest.mark.parametrize("case", ["elu", "elu, rotary, difference", "softmax", "focused"])
def test_packs_of_other_sizes_compile_nothing(case):
    """They launch as many programs as images of one size, and all that Triton compiles these for is the same."""
    kernels = pytest.importorskip("benchmarks.kernels")
    size = 3, 32, torch.bfloat16
    launched, compiled = [kernels.step(case, 64, 3136, *size)], []
    for packed in PACKS:
        launched.append(kernels.step(case, packed, packed.num_queries, *size))
        programs = (one for each in launched[-1] for one in each if one[0] is not torch.sum)
        compiled.append([repr(kernels.source(one)) for one in programs])
    assert [[len(one) for one in each] for each in launched[1:]] == 3 * [[len(one) for one in launched[0]]]
    assert compiled[0] == compiled[1] == compiled[2]


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "interpreted", "sentence"),
    [
        (3, 8, torch.float32, False, "tensors of a CUDA device, not of cpu"),
        (3, 8, torch.float64, True, "float32, bfloat16 and float16, not float64"),
        (3, 136, torch.float32, True, "heads of at most 128 channels, not 136"),
        (0, 8, torch.float32, True, "at least one image, query and key"),
    ],
)
def test_what_kernels_do_not_take_is_refused(monkeypatch, tokens, width, dtype, interpreted, sentence):
    monkeypatch.setattr("linvit.attention.kernels.formula.INTERPRETED", interpreted)
    q, k = torch.zeros(1, 2, 5, width, dtype=dtype), torch.zeros(1, 2, tokens, width, dtype=dtype)
    with pytest.raises(UserError, match=sentence):
        linear_attention(q, k, k, Formula("elu"))


@pytest.mark.parametrize(
    ("values", "given", "sentence"),
    [
        ((1, 2, 7, 4), {"phi": "focused", "power": 0.5}, "power of focused features is at least 1; got 0.5"),
        ((1, 2, 7, 4), {"phi": "gelu"}, "phi is one of elu, relu, focused, exp, softmax; got 'gelu'"),
        ((1, 2, 6, 4), {}, r"takes v \[1, 2, 7, 4\]; got \[1, 2, 6, 4\]"),
        ((1, 2, 7, 4), {"weights": torch.ones(1, 7)}, r"takes weights \[1, 2, 7\]; got \[1, 7\]"),
        ((1, 2, 7, 4), {"turns": (torch.ones(7, 4, 2), None)}, r"takes turns of q \[5, 4, 2\]; got \[7, 4, 2\]"),
    ],
)
def test_what_is_no_formula_of_such_tensors_is_refused(monkeypatch, values, given, sentence):
    monkeypatch.setattr("linvit.attention.kernels.formula.INTERPRETED", True)
    q, k = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 7, 8)
    with pytest.raises(UserError, match=sentence):
        linear_attention(q, k, torch.zeros(values), Formula(**{"phi": "elu"} | given))


def test_a_pack_of_other_tokens_is_refused(monkeypatch):
    monkeypatch.setattr("linvit.attention.kernels.formula.INTERPRETED", True)
    x = torch.zeros(1, 2, 7, 8)
    with pytest.raises(UserError, match=r"has rows \(1, h, 6, d\); got q \[1, 2, 7, 8\]"):
        linear_attention(x, x, x, Formula("elu"), Packed([(1, 2), (2, 2)]))


def test_a_cpu_computes_without_triton(monkeypatch):
    """The programs are not even imported."""
    monkeypatch.setitem(sys.modules, "linvit.attention.kernels.linear", None)
    monkeypatch.delattr("linvit.attention.kernels.linear", raising=False)
    layer = linvit.AttentionLayer(16, 2, Grid((2, 2)), attention="linear")
    layer(torch.zeros(1, 4, 16), Grid((2, 2))).sum().backward()


def test_triton_needs_a_device_and_a_mechanism(monkeypatch):
    grid = Grid((2, 2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    linear = create_attention("linear", dim=8, num_heads=2, grid=grid)
    with pytest.raises(UserError, match="needs a CUDA device"):
        set_attention_kernel(linear, "triton")
    monkeypatch.setattr(choice, "INTERPRETED", True)
    if importlib.util.find_spec("triton"):
        set_attention_kernel(linear, "triton")
        assert linear.attention_kernel == "triton"
        hydra = create_attention("hydra", dim=8, num_heads=2, grid=grid)
        with pytest.raises(UserError, match="HydraAttention has no kernel"):
            set_attention_kernel(nn.Sequential(hydra), "triton")


def test_a_subclass_inherits_no_formula():
    class Other(type(create_attention("linear", dim=8, num_heads=2, grid=Grid((2, 2))))):
        pass

    assert not choice.has_kernel(Other(8, 2, Grid((2, 2))))


def test_what_was_measured_is_of_mechanisms_and_on_its_page():
    names = {choice.mechanism_name(attentions.get(name)) for name in attentions.names()}
    page = (Path(__file__).parents[2] / "benchmarks/2026-11-26-h100.md").read_text(encoding="utf-8")
    for card, ratios in choice.MEASURED.items():
        assert ratios.keys() <= names
        assert card in page
        for name, ratio in ratios.items():
            assert f"{name.split('.')[2]} {ratio:.2f}" in page.replace("\n", " ")


@pytest.mark.parametrize(
    ("card", "dtype", "width", "chosen"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 64, "triton"),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 96, None),
        ("NVIDIA H100 80GB HBM3", torch.float32, 64, None),
        ("a card", torch.bfloat16, 64, None),
    ],
)
def test_auto_takes_a_kernel_where_it_was_measured(monkeypatch, card, dtype, width, chosen):
    x = mock.Mock(is_cuda=True, dtype=dtype, shape=(1, 2, 9, width), device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    monkeypatch.setattr(choice, "supports_custom_autograd", lambda v: True)
    mechanism = create_attention("linear", dim=2 * width, num_heads=2, grid=Grid((3, 3)))
    assert choice._chosen(mechanism, x, x) == chosen
    assert choice.kernel_output(mechanism, x, x, x, Packed([(3, 3)])) is None  # none was measured for packs


def test_a_kernel_of_another_package_computes_attention(monkeypatch):
    """As it says that it does: this one for heads of 4 channels, on any device."""
    asked = []

    def own(q, k, v, formula):
        asked.append(formula.phi)
        return plain(q, k, v, formula) if v.shape[-1] == 4 else None

    monkeypatch.setattr(choice, "_loaded", {})
    monkeypatch.setattr(attention_kernels, "_registered", {})
    linvit.register_attention_kernel("own")(own)
    x, grid = torch.randn(2, 9, 16, requires_grad=True), Grid((3, 3))
    for heads in (4, 2):
        layer = linvit.AttentionLayer(16, heads, grid, attention="focused")
        set_attention_kernel(layer, "own")
        gradients = [torch.autograd.grad(layer(x, grid).square().sum(), [x, *layer.parameters()])]
        assert asked == ["focused"]
        asked.clear()
        layer(x.flatten(0, 1)[None], Packed([grid.size] * 2))  # which it does not know
        set_attention_kernel(layer, "torch")
        gradients.append(torch.autograd.grad(layer(x, grid).square().sum(), [x, *layer.parameters()]))
        assert not asked
        for found, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"auto, torch, triton, own; got 'owm'.*own"):
        set_attention_kernel(layer, "owm")
    with pytest.raises(UserError, match="HydraAttention has no kernel"):
        set_attention_kernel(create_attention("hydra", dim=8, num_heads=2, grid=grid), "own")


class Masked(linvit.Attention):
    """Has a kernel, and a mask that the kernel does not know."""

    def formula(self, q, k, grid):
        return Formula("relu", eps=1.0)

    def core(self, q, k, v, grid, mask=None):
        q, k = q.relu(), k.relu() if mask is None else k.relu() * mask[:, None, :, None]
        return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1) + 1)


def test_a_call_with_a_mask_takes_no_kernel_that_would_ignore_it(monkeypatch):
    monkeypatch.setattr(choice, "_loaded", {"own": plain})
    module, (q, k, v), grid = Masked(8, 2, Grid((3, 3))), torch.randn(3, 1, 2, 9, 4), Grid((3, 3))
    mask = torch.arange(9)[None] < 5
    want = module(q, k, v, grid, mask=mask)
    module.attention_kernel = "own"
    assert torch.equal(module(q, k, v, grid, mask=mask), want)
    torch.testing.assert_close(module(q, k, v, grid), module(q, k, v, grid, mask=torch.ones_like(mask)))
