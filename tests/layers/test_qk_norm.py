"""Norms of queries and keys as an option of the host: SANA's code, lengths, every family, any mechanism."""

from typing import Any

import pytest
import torch

import linvit
from linvit import AttentionLayer, Grid, UserError
from linvit.layers.hosting import QueryKeyNorm
from tests.families import families, small
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, randn

RELU: dict[str, Any] = {"name": "linear", "feature_map": "relu", "eps": 1e-15}


@both_precisions
@of_case("linear_qk_norm_core")
def test_linear_attention_of_normed_queries_and_keys_is_sanas(golden: Golden, dtype: torch.dtype) -> None:
    leaves, (q, k, v) = golden.leaves(dtype), golden.inputs(dtype)
    heads, tokens, width = q.shape[1:]
    grid = Grid((1, tokens))
    turned = []
    for letter, x in (("q", q), ("k", k)):
        norm = QueryKeyNorm("rms", heads, width)
        tokens_first = x.transpose(1, 2).flatten(2)
        normed = torch.func.functional_call(norm, {"weight": leaves[f"{letter}_norm.weight"]}, (tokens_first,))
        turned.append(normed.unflatten(2, (heads, width)).transpose(1, 2))
    mechanism = linvit.create_attention(RELU, dim=heads * width, num_heads=heads, grid=grid)
    out = mechanism(*turned, v, grid)
    golden.check_call(out, [q, k, v])
    golden.check_leaves(leaves)
    for name, got in {"output": out, "grad_input.q": q.grad, "grad_input.k": k.grad, "grad_input.v": v.grad}.items():
        assert_near(got, golden.tensors[name], 1e-5)


@both_precisions
@of_case("linear_qk_norm")
def test_the_layer_is_sanas(golden: Golden, dtype: torch.dtype) -> None:
    official, (x,) = golden.constructor, golden.inputs(dtype)
    grid = Grid((4, 7))
    layer = AttentionLayer(
        official["in_dim"], official["heads"], grid, attention=RELU, qkv_bias=False, qk_norm="rms"
    ).to(dtype)
    layer.load_state_dict(golden.parameters())
    out = layer(x, grid)
    golden.check_call(out, [x])
    for name, parameter in layer.named_parameters():
        assert_near(parameter.grad, golden.tensors[f"grad_param.{name}"], 1e-5)
    assert_near(out, golden.tensors["output"], 1e-5)
    assert_near(x.grad, golden.tensors["grad_input"], 1e-5)


def test_l2_brings_every_head_to_its_factor() -> None:
    norm = QueryKeyNorm("l2", 3, 4).double()
    norm.weight.data[1] = 5
    lengths = norm(randn(2, 6, 12)).unflatten(2, (3, 4)).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.tensor([2.0, 5.0, 2.0]).double().expand(2, 6, 3))
    assert not norm(torch.zeros(1, 1, 12)).any()


@pytest.mark.parametrize("name", sorted({*families().values()} - {"timm", "macunet_encoder"}))
def test_every_family_takes_it(name: str) -> None:
    torch.manual_seed(0)
    for kind in ("rms", "l2"):
        model = linvit.create_backbone({**small(name), "qk_norm": kind, "img_size": 64, "num_classes": 3})
        model(torch.randn(2, 3, 64, 64)).square().sum().backward()
        gradients = [p.grad for key, p in model.named_parameters() if "q_norm" in key or "k_norm" in key]
        assert gradients
        assert all(gradient is not None and gradient.any() for gradient in gradients)


def test_it_stays_where_the_mechanism_goes() -> None:
    model = linvit.create_backbone({"name": "deit_nano", "qk_norm": "rms"}, attention="softmax")
    model.blocks[0].attn.k_norm.weight.data.fill_(3)
    linvit.replace_attention(model, ["soft", *["linear"] * (len(model.blocks) - 1)])
    assert model.blocks[0].attn.k_norm is None
    assert isinstance(model.blocks[0].attn.q_norm, QueryKeyNorm)
    linvit.replace_attention(model, "poly_nl")
    assert model.blocks[1].attn.q_norm is None
    with pytest.raises(UserError, match=r"qk_norm.*'none', 'rms', 'l2'|qk_norm.*none, rms.*l2"):
        linvit.create_backbone({"name": "deit_nano", "qk_norm": "layer"})
