"""Images of several sizes in one call: each gets what it gets alone, bit for bit apart from the others."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim.swa_utils import AveragedModel

import linvit
from linvit import Grid, Packed, UserError
from linvit.attention.linear import LinearAttention
from linvit.backbones.deit import DeiT
from tests.helpers import perturb, randn, relative_error

SIZES = [(16, 24), (40, 8), (24, 24), (16, 24), (8, 32)]
IN_FLOAT32 = 1e-6  # as timm resizes positions, so that the sum of their gradients is rounded
SMALL = {"img_size": 24, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def given(sizes: Sequence[tuple[int, int]] = SIZES, grad: bool = False) -> list[Tensor]:
    return [(randn(3, *size, dtype=torch.float64) * (i + 1)).requires_grad_(grad) for i, size in enumerate(sizes)]


def deit(**options: Any) -> Any:
    torch.manual_seed(0)
    return perturb(DeiT(**{**SMALL, **options}).double()).eval()


def assert_as_alone(network: Any, of_positions: float = 1e-12) -> None:
    """Outputs and gradients of images and parameters are those of each image alone."""
    images = given(grad=True)
    sources = [*images, *network.parameters()]
    limits = [1e-12] * (1 + len(images)) + [
        of_positions if "pos_embed" in name else 1e-12 for name, _ in network.named_parameters()
    ]
    found = []
    for out in (linvit.forward_images(network, images), torch.cat([network(image[None]) for image in images])):
        gradients = torch.autograd.grad(out, sources, randn(*out.shape, dtype=torch.float64), allow_unused=True)
        found.append([out, *(0 * own if x is None else x for own, x in zip(sources, gradients, strict=True))])
    for got, want, limit in zip(*found, limits, strict=True):
        assert relative_error(got, want) <= limit


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "linear"},
        {"attention": "focused", "class_token": False, "global_pool": "avg"},
        {"attention": "linear", "distilled": True, "qk_norm": "rms"},
        {"attention": ["mlla", "softmax"], "cpe": True, "ffn": "mbconv"},
        {"rel_pos_bias": True, "input_norm": True},
        {"attention": {"layout": "jetvit", "linear": "jetvit", "window": 2, "full": [2]}, "depth": 4},
        {"attention": {"layout": "vitdet", "window": 2}, "depth": 6, "class_token": False, "global_pool": "avg"},
        {"attention": [{"name": name, "window_size": 2} for name in ("sla", "lolcats")], "cpe": True},
        {"decomposed_positions": True, "class_token": False, "global_pool": "avg", "window_size": 2},
    ],
    ids=str,
)
def test_deit_gives_each_image_what_it_gives_it_alone(options: dict[str, Any]) -> None:
    assert_as_alone(deit(**options))


def test_recomputed_blocks_have_the_same_gradients() -> None:
    network = deit(attention="focused")
    network.set_grad_checkpointing()
    assert_as_alone(network.train())


@pytest.mark.parametrize("attention", [None, "linear", "focused", "rala"])
def test_timms_vit_gives_each_image_what_it_gives_it_alone(attention: str | None) -> None:
    own = {name: SMALL[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")}
    network = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **own)
    if attention is not None:
        linvit.replace_attention(network, attention, 24)
    assert_as_alone(perturb(network.double()).eval(), of_positions=IN_FLOAT32)


@pytest.mark.parametrize(("attention", "pos_embed"), [("linear", "learned"), ("mala", "factorized"), (None, "learned")])
def test_naflexvit_gives_each_image_what_it_gives_it_alone(attention: str | None, pos_embed: str) -> None:
    options = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "pos_embed_grid_size": (3, 3)}
    network: nn.Module = timm.create_model(
        "naflexvit_base_patch16_gap",
        num_classes=5,
        reg_tokens=2,
        embed_proj_type="conv",
        pos_embed=pos_embed,
        **options,
    )
    if attention is not None:
        linvit.replace_attention(network, attention, 24)
    assert_as_alone(perturb(network.double()).eval(), of_positions=IN_FLOAT32)


def test_images_of_one_size_take_the_dense_path_bit_for_bit() -> None:
    network, images = deit(attention="focused"), given([(16, 24)] * 3)
    assert torch.equal(network(images), network(torch.stack(images)))


@pytest.mark.parametrize("attention", ["linear", "focused", "mala"])
def test_another_image_leaves_the_bits_of_the_others(attention: str) -> None:
    network, images = deit(attention=attention), given(grad=True)

    def run() -> tuple[Tensor, ...]:
        out = network(images)
        return out[1:], *torch.autograd.grad(out[1:].square().sum(), images[1:])

    before = run()
    images[0] = -3 * images[0].detach()
    assert all(map(torch.equal, run(), before))


def test_stochastic_depth_drops_paths_image_by_image() -> None:
    network = deit(attention="linear", drop_path_rate=0.9, depth=1).train()
    network.blocks[0].drop_path1.drop_prob = network.blocks[0].drop_path2.drop_prob = 0.5
    images = given()
    alone = torch.cat([network.eval()(image[None]) for image in images])
    network.train()
    kept = [
        relative_error(out, want) < 1e-12 for _ in range(20) for out, want in zip(network(images), alone, strict=True)
    ]
    assert not any(kept)  # paths that are kept are scaled by 2
    for block in network.blocks:
        block.drop_path1.scale_by_keep = block.drop_path2.scale_by_keep = False
    kept = [
        relative_error(out, want) < 1e-12 for _ in range(20) for out, want in zip(network(images), alone, strict=True)
    ]
    assert 10 <= sum(kept) <= 45  # 25 of 100 are expected: both paths of an image, whatever the others do


@pytest.mark.parametrize("name", ["pvt_tiny", "swin_tiny", "cswin_tiny"])
def test_pyramids_refuse_images_of_several_sizes_by_name(name: str) -> None:
    network = linvit.create_backbone(name, num_classes=5, img_size=64)
    with pytest.raises(UserError, match=f"^{type(network).__name__} takes images of one size"):
        network([torch.zeros(3, 64, 64), torch.zeros(3, 64, 32)])


def test_other_networks_refuse_them_too() -> None:
    with pytest.raises(UserError, match=r"^ResNet takes images of one size"):
        linvit.forward_images(timm.create_model("resnet18"), [torch.zeros(3, 64, 64), torch.zeros(3, 64, 32)])
    with pytest.raises(UserError, match="dynamic_img_size: true"):
        linvit.forward_images(timm.create_model("vit_tiny_patch16_224"), given())
    with pytest.raises(UserError, match=r"one dtype; got none"):
        deit()([])


def test_compiled_networks_leave_packs_to_torchs_operators() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    network, plain = deit(attention="linear"), deit(attention="linear")
    compiled = torch.compile(network, backend=counter)
    for i in range(12):
        images = given([(8 + 8 * (i % 5), 16), (24, 8 + 8 * (i % 3)), (8, 8)])
        assert relative_error(compiled(images), plain(images)) < 1e-12
    assert counter.frame_count <= 8


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_that_are_compiled_one_by_one_compile_nothing_for_packs(checkpointing: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    network, plain = deit(attention="linear").train(), deit(attention="linear")
    network.set_grad_checkpointing(checkpointing)
    network.blocks[0].compile(backend=counter)
    network.blocks[1] = torch.compile(network.blocks[1], backend=counter)
    for sizes in (SIZES, SIZES[1:]):
        out = network(given(sizes))
        assert relative_error(out, plain(given(sizes))) < 1e-12
        out.sum().backward()
    assert counter.frame_count == 0


def test_timms_blocks_are_recomputed_with_their_own_pack() -> None:
    """Also if other images were embedded since."""
    own = {name: SMALL[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")}
    network: Any = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **own)
    linvit.replace_attention(network, "mala", 24)
    network.double().train()
    found = []
    for checkpointing in (False, True):
        network.set_grad_checkpointing(checkpointing)
        both = [linvit.forward_images(network, given(sizes)) for sizes in (SIZES, SIZES[1:])]
        found.append(torch.autograd.grad(torch.cat(both).square().sum(), [*network.parameters()]))
    assert all(map(torch.equal, *found))
    assert isinstance(network.blocks[0].attn.patches.grid, Grid)  # no pack stays in memory


def test_timms_parallel_blocks_run_the_images_of_each_size_as_a_batch() -> None:
    own = {name: SMALL[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")}
    assert_as_alone(timm.create_model("vit_small_patch16_18x2_224", dynamic_img_size=True, **own).double().eval())


@pytest.mark.parametrize("wrap", [AveragedModel, lambda network: torch.compile(network, backend="eager")])
def test_wrapped_networks_take_lists(wrap: Callable[[nn.Module], Any]) -> None:
    network = deit(attention="linear")
    assert torch.equal(linvit.forward_images(wrap(network), given()), network(given()))


def test_a_pack_of_inference_mode_can_be_trained_with() -> None:
    packed = Packed([(3, 4), (2, 2), (3, 4)], num_prefix=1)
    row = randn(1, 2, packed.num_queries, 8)
    for name in ("cosformer", "mala", "mlla", "sla", "window"):
        mechanism = linvit.create_attention(name, dim=16, num_heads=2, grid=Grid((4, 4), num_prefix=1)).double()
        with torch.inference_mode():
            want = mechanism(row, row, row, packed)
        out = mechanism(row, row, row.clone().requires_grad_(), packed)
        assert torch.equal(out, want)
        out.sum().backward()


def test_a_subclass_does_not_inherit_that_it_packs() -> None:
    """What it changes may mix the tokens of several images."""

    class Changed(LinearAttention):
        pass

    assert LinearAttention.facts.packs
    assert not Changed.facts.packs
    assert not Changed(8, 2, Grid((2, 2))).facts.packs


def test_a_subclass_may_pool_in_another_way() -> None:
    class Largest(DeiT):
        def pool(self, x: Tensor) -> Tensor:
            return x.amax(1)

    assert_as_alone(perturb(Largest(**SMALL, attention="linear").double()).eval())


@pytest.mark.parametrize("name", ["focused", "enhanced_linear", "mala"])
def test_wide_and_high_images_fill_no_plane(name: str) -> None:
    packed = Packed([(1, 40), (40, 1), (1, 40)], num_prefix=1)
    mechanism = perturb(linvit.create_attention(name, dim=16, num_heads=2, grid=Grid((4, 4), num_prefix=1)).double())
    places: list[int] = []
    for module in mechanism.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda _, given: places.append(given[0][0, 0].numel()))
    row = randn(1, 2, packed.num_queries, 8, dtype=torch.float64)
    out = mechanism(row, row, row, packed)
    assert max(places) == 40
    want = packed.map_images(lambda x, grid: mechanism(x, x, x, grid), row)
    assert relative_error(out, want) < 1e-12


@pytest.mark.parametrize("name", ["window", "sla", "lolcats"])
def test_windows_larger_than_most_images_change_nothing(name: str) -> None:
    """Of 12 images of 2 x 2 and one of 8 x 8, all in windows of 8 x 8, seven eighths of the places would be empty."""
    packed = linvit.Packed([(2, 2)] * 12 + [(8, 8)], num_prefix=1)
    mechanism = perturb(
        linvit.create_attention({"name": name, "window_size": 8}, dim=8, num_heads=2, grid=Grid((8, 8)))
    )
    rows = [randn(1, 2, packed.num_queries, 4).double().requires_grad_() for _ in range(3)]
    out, alone = mechanism.double()(*rows, packed), packed.map_images(mechanism, *rows)
    assert relative_error(out, alone) < 1e-12
    sources = [*rows, *mechanism.parameters()]
    both = [torch.autograd.grad(each.square().sum(), sources, materialize_grads=True) for each in (out, alone)]
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)  # that of window_factors is 0


def test_mechanisms_without_a_packed_form_say_so_once() -> None:
    network = deit(attention="soft")
    with pytest.warns(UserWarning, match="SoftAttention does not declare packs") as said:
        _ = [network(given()) for _ in range(3)]
    assert len([one for one in said if "packs" in str(one.message)]) == 1


def test_lists_that_cannot_be_packed_are_refused() -> None:
    model = linvit.create_backbone("deit_nano", num_classes=3)
    image = torch.randn(3, 32, 32)
    for images, given in {(): "none", (image, image.double()): "3-d torch.float32, 3-d torch.float64"}.items():
        with pytest.raises(UserError, match=f"tensors \\(C, H, W\\) of one dtype; got {given}"):
            model(list(images))
    for images, given in (([image.numpy()], "ndarray"), ([image[None]], "4-d torch.float32")):
        with pytest.raises(UserError, match=f"of one dtype; got {given}"):
            model(images)
    with pytest.raises(UserError, match=r"Call pack\(images\) for the tokens"):
        model.forward_features([image, image[:, :16]])
    with pytest.raises(UserError, match=r"forward_intermediates takes a batch"):
        model.forward_intermediates([image, image[:, :16]])
