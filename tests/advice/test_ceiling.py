"""The operator that takes the core of attention out: values, gradients, and what compilers keep of its inputs."""

import pytest
import timm
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import linvit
from linvit.advice.ceiling import InterceptedAttention, Values, copy_of_values, values_for_queries
from linvit.advice.rivals import smaller
from linvit.advice.subject import CEILING
from tests.helpers import randn


def test_values_are_a_copy_and_queries_and_keys_get_zeros():
    q, k, v = (randn(2, 3, 4, 5, seed=i, grad=True) for i in range(3))
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")  # tracing is tested below
    assert torch.library.opcheck(copy_of_values, (q, k, v), test_utils=utilities)
    out = values_for_queries(q, k, v)
    assert torch.equal(out, v)
    assert out.data_ptr() != v.data_ptr()
    assert out.transpose(1, 2).is_contiguous()
    gradient = randn(*out.shape, seed=9)
    found = torch.autograd.grad(out, (q, k, v), gradient)
    assert not found[0].any()
    assert not found[1].any()
    assert torch.equal(found[2], gradient)


def test_fewer_keys_and_heads_are_repeated():
    q, k, v = randn(1, 4, 7, 5), randn(1, 2, 3, 5), randn(1, 2, 3, 6)
    out = values_for_queries(q, k, v)
    assert out.shape == (1, 4, 7, 6)
    assert torch.equal(out[0, 1, 3:6], v[0, 0])
    assert torch.equal(out[0, 2, 6], v[0, 1, 0])


@pytest.mark.parametrize("train", [False, True])
def test_compilers_keep_the_projections_that_nothing_reads(train):
    """Also where q has a projection of its own; without the operator dead code would be eliminated."""
    q, kv = torch.nn.Linear(8, 8), torch.nn.Linear(8, 16)

    def layer(x):
        k, v = kv(x)[:, None].chunk(2, -1)
        out = values_for_queries(q(x)[:, None], k, v)
        return torch.autograd.grad(out.sum(), (q.weight, kv.weight)) if train else out

    graph = make_fx(layer)(torch.randn(2, 4, 8))
    graph.graph.eliminate_dead_code()
    products = [node for node in graph.graph.nodes if str(node.target) in ("aten.addmm.default", "aten.mm.default")]
    assert len(products) == (4 if train else 2)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "pvt_v2_b0", "swin_tiny_patch4_window7_224"])
def test_it_replaces_the_attention_of_any_host(name):
    with torch.device("meta"):
        network = linvit.replace_attention(timm.create_model(name), CEILING)
        assert sum(isinstance(module, Values) for module in network.modules()) in (8, 12)
        assert network(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)


def test_calls_of_sdpa_are_counted_and_their_core_taken_out():
    q, k, v = (randn(1, 2, 3, 4, seed=i) for i in range(3))
    with InterceptedAttention() as calls:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), v)
    assert calls.calls == 1
    with InterceptedAttention(replace=False) as calls:
        assert not torch.equal(F.scaled_dot_product_attention(query=q, key=k, value=v), v)
    assert calls.calls == 1


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vit_small_patch16_224", "vit_tiny_patch16_224"),
        ("pvt_v2_b2", "pvt_v2_b1"),
        ("vit_tiny_patch16_224", None),
        ("vit_small_patch14_dinov2", None),
        ("swin_base_patch4_window7_224", "swin_small_patch4_window7_224"),
    ],
)
def test_the_next_smaller_model(name, found):
    assert smaller(name) == found
