"""What a recorder keeps of a model's forward pass, and when it cannot."""

import pytest
import timm
import torch

import linvit
from linvit import UserError
from linvit.analysis import Recorder, attention_matrix
from linvit.analysis.recorder import observe
from tests.helpers import assert_near, randn


@pytest.mark.parametrize("attention", ["linear", "focused", "enhanced_linear", "poly_nl"])
def test_a_call_is_the_first_images(attention: str) -> None:
    model = linvit.create_backbone("deit_nano", attention=attention, num_classes=0).double().eval()
    images = randn(2, 3, 32, 32)
    with Recorder(model) as recorder:
        model(images)
    assert list(recorder.calls) == [f"blocks.{i}.attn" for i in range(4)]
    call = recorder.calls["blocks.1.attn"]
    assert call.mechanism is model.blocks[1].attn.mechanism
    assert call.grid == linvit.Grid((8, 8))
    assert (call.q.shape[0], call.q.requires_grad) == (1, False)
    extra = {} if call.x is None else {"x": call.x}
    want = attention_matrix(call.mechanism, call.q, call.k, call.grid, v=call.v, **extra)[0]
    assert_near(call.matrix(), want, 0)
    with Recorder(model) as alone:
        model(images[:1])
    assert_near(call.q, alone.calls["blocks.1.attn"].q, 1e-12)


def test_no_hook_stays_and_the_calls_do() -> None:
    model = linvit.create_backbone("deit_nano")
    with pytest.raises(linvit.UserError), Recorder(model) as recorder:
        model(torch.zeros(1, 4, 32, 32))
    assert not recorder.calls
    with Recorder(model) as recorder:
        model(torch.zeros(1, 3, 32, 32))
    before = recorder.calls["blocks.0.attn"]
    model(torch.ones(1, 3, 32, 32))
    assert recorder.calls["blocks.0.attn"] is before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_a_mechanism_is_refused_with_the_way_out() -> None:
    stock = timm.create_model("test_vit")
    with pytest.raises(
        UserError, match=r"VisionTransformer contains no attention mechanism .* linvit\.replace_attention"
    ):
        Recorder(stock)
    linvit.replace_attention(stock, "softmax")
    with Recorder(stock) as recorder:
        stock(torch.zeros(1, 3, 160, 160))
    assert len(recorder.calls) == len(stock.blocks)


@pytest.mark.parametrize(
    ("attention", "side", "numbers"),
    [
        ("softmax", 4, 16 * (32 + 32)),  # keys and values
        ("softmax", 8, 64 * (32 + 32)),
        ("linear", 4, 16 * (32 + 32)),  # which are fewer than the sums
        ("linear", 8, 32 * (32 + 1)),
        ("focused", 8, 32 * (32 + 1)),  # of its kernel, beside a convolution
        ("hydra", 8, 32 * 2),
    ],
)
def test_the_state_is_what_is_kept_of_keys_and_values(attention: str, side: int, numbers: int) -> None:
    options = {"embed_dim": 64, "num_heads": 2, "depth": 1, "img_size": 4 * side}
    model = linvit.create_backbone("deit_nano", attention=attention, **options)
    (call,) = observe(model, torch.randn(1, 3, 4 * side, 4 * side)).values()
    assert call.state() == 4 * 2 * numbers


@pytest.mark.parametrize("attention", ["window", "lolcats", "sla", "softmax"])
def test_windows_keep_all_keys_and_values(attention: str) -> None:
    """For any query: linear sums beside them follow from them."""
    model = linvit.create_backbone("deit_nano", attention=attention, img_size=64)
    with Recorder(model) as recorder:
        model(randn(1, 3, 64, 64).float())
    call = recorder.calls["blocks.0.attn"]
    assert call.state() == 4 * (call.k.numel() + call.v.numel())
