"""linvit's attention in timm's models beyond plain transformers, PVTv2 and Swin: what is kept, what is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

from linvit import UserError, replace_attention
from linvit.analysis.recorder import Recorder, observe
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.timm.hosts import ReplacedAttention
from linvit.registry import attentions
from tests.backbones.timm.hosts import HOSTS, build
from tests.helpers import assert_near, own_names, perturb, randn


class OwnSoftmax(SoftmaxAttention):
    """Softmax by another name, for a model in which softmax is refused."""


OWN_SOFTMAX = f"{__name__}:OwnSoftmax"


def images(*size: int) -> Tensor:
    return randn(2, 3, *size, dtype=torch.float32)


def outputs_and_gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The logits, the gradient of the images, and those of parameters by name."""
    x = x.clone().requires_grad_()
    model.train()  # timm's TinyViT and LeViT keep biases of an earlier pass until then
    model.eval()
    logits: Tensor = model(x)
    model.zero_grad()
    (logits.square().sum() + logits[0, 0]).backward()
    assert x.grad is not None
    found = {name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), x.grad, found


@pytest.mark.parametrize("name", HOSTS)
def test_softmax_in_the_place_of_softmax_changes_nothing(name: str) -> None:
    side, _, other = HOSTS[name]
    model = perturb(build(name), scale=0.05).double()
    spec = "softmax"
    if name.startswith("cait"):  # only with heads that do not mix
        spec = OWN_SOFTMAX
        for block in model.blocks:
            for mixing in (block.attn.proj_l, block.attn.proj_w):
                nn.init.eye_(mixing.weight)
                nn.init.zeros_(mixing.bias)
    ours = replace_attention(copy.deepcopy(model), spec, side)
    assert any(isinstance(module, ReplacedAttention) for module in ours.modules())
    for size in [(side, side)] + ([] if other is None else [other]):
        if other is not None and size == other and hasattr(model, "set_input_size"):
            for network in (model, ours):
                network.set_input_size(other)
        want, want_of_images, gradients = outputs_and_gradients(model, images(*size).double())
        got, of_images, own = outputs_and_gradients(ours, images(*size).double())
        assert_near(got, want, 1e-5)
        assert_near(of_images, want_of_images, 1e-5)
        common = [key for key in own if key in gradients]
        assert len(common) > len(gradients) // 2
        floor = 1e-6 * max(gradient.abs().max() for gradient in gradients.values())  # softmax's shifts have none
        for key in common:
            assert (own[key] - gradients[key]).abs().max() <= 1e-5 * max(gradients[key].abs().max(), floor), key


REFUSED = {
    **{family: {"mlla"} for family in ("samvit", "swinv2", "maxvit", "davit", "tiny")},  # its stem is of the map
    "hiera": {
        "mlla",
        "inline",
        "poly_nl",
        "separable",
        "vssd",
        "vittt",
    },  # which take tokens that are narrower than heads
    "cait": {"softmax"},
    "levit": {"mlla", "soft", "soft_norm", "additive", "aft_simple", "hydra", "poly_nl", "separable", "xca"}
    | {"circulant", "t5", "vittt"},  # q, k and v of one width
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTS)
def test_every_mechanism_is_trained_whole_or_refused(name: str) -> None:
    side = HOSTS[name].side
    model = build(name).train()
    refused = set()
    for attention in own_names(attentions):
        network = copy.deepcopy(model)
        try:
            replace_attention(network, attention, side)
        except UserError:
            refused.add(attention)
            continue
        logits = network(images(side, side))
        (logits if isinstance(logits, Tensor) else sum(logits)).square().sum().backward()
        assert [key for key, parameter in network.named_parameters() if parameter.grad is None] == []
    assert refused == REFUSED.get(name.split("_")[0], set())


@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [
        ("cait_xxs24_224", "softmax", r"CaiT mixes the heads of softmax's logits.*leave its own in place \(null\)"),
        (
            "hiera_tiny_224",
            "poly_nl",
            r"heads of 32 channels for tokens of 16, .* PolyNLAttention, which does not project",
        ),
        ("levit_128s", "soft", r"one BatchNorm for q, k and v, and SoftAttention projects 'qv'"),
        ("tiny_vit_5m_224", "mlla", r"timm's TinyViT passes windows to its attention, so the stem"),
    ],
)
def test_what_a_host_refuses_it_says(name: str, attention: str, message: str) -> None:
    model = build(name)
    with pytest.raises(UserError, match=message):
        replace_attention(model, attention, HOSTS[name].side)
    assert not any(isinstance(module, ReplacedAttention) for module in model.modules())  # none, or all


def test_weights_keep_their_names_and_order() -> None:
    """So that a file of timm's weights is for the model with another attention, too."""
    for name in ("tiny_vit_5m_224", "levit_128s", "maxvit_tiny_tf_224", "hiera_tiny_224", "swinv2_tiny_window8_256"):
        model = perturb(build(name), scale=0.1)
        ours = replace_attention(copy.deepcopy(model), "linear", HOSTS[name].side)
        weights = model.state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in ours.state_dict().items() if key in weights), name


@torch.no_grad()
def test_matrices_are_seen_as_of_any_layer() -> None:
    """The recorded matrix times the values is what is mixed; timm's own attention is seen through softmax."""
    sizes = {
        "hiera_tiny_224": {(64, 64), (16, 64), (16, 16), (4, 16)},
        "levit_128s": {(16, 16), (4, 4), (1, 1)},
    }
    for name, want in sizes.items():
        side = HOSTS[name].side
        model = replace_attention(build(name), "linear", side).eval()
        with Recorder(model, samples=None) as recorder:
            model(images(side, side))
        for call in recorder.calls.values():
            want_of_call = call.mechanism(call.q, call.k, call.v, call.grid)[0]
            assert_near((call.matrix() @ call.v[0].to(call.matrix())).float(), want_of_call, 1e-5)
        seen = observe(build(name), images(side, side)[:1])
        assert {tuple(call.matrix().shape[-2:]) for call in seen.values()} == want
        assert seen.keys() == recorder.calls.keys()
