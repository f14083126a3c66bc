"""The distance of a student to its teacher, against LoLCATs' own functions and by what it must not touch."""

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import timm
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from linvit import Attention, Grid, UserError, create_backbone, list_attentions
from linvit.experiments.measure import peak_memory
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.linearization.distillation import Distillation, Matching
from linvit.linearization.student import linearize
from tests.golden_files import load
from tests.training import trainer

GRID = Grid((3, 5), num_prefix=1)


class LearnedSoftmaxFeatures(Attention):
    """LoLCATs' attention: features softmax(x W) and softmax(-x W), with a W per head for q and one for k."""

    def __init__(self, dim: int, num_heads: int, grid: Grid, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.of_q = nn.Parameter(torch.zeros(num_heads, self.head_dim, self.head_dim))
        self.of_k = nn.Parameter(torch.zeros(num_heads, self.head_dim, self.head_dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        q, k = (
            torch.cat([mapped.softmax(-1), (-mapped).softmax(-1)], dim=-1).clamp(min=1e-12)
            for mapped in (q @ self.of_q, k @ self.of_k)
        )
        weights = q @ k.mT
        return weights / weights.sum(-1, keepdim=True) @ v


class Tokens(nn.Module):
    """Two blocks on tokens."""

    num_prefix_tokens = 1

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(16, AttentionLayer(16, 2, GRID, attention=attention), Mlp(16, 32), 0.0, 1e-6) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, GRID)
        return x


OPTIONS = {
    "mixed_all": Matching(attention_inputs="teacher"),
    "mixed_patches": Matching(attention_inputs="teacher", attention_tokens="patches"),
    "projected_patches": Matching(attention_inputs="teacher", attention_at="projected", attention_tokens="patches"),
    "own_inputs": Matching(attention_tokens="patches"),
    "copied_qkv": Matching(attention_inputs="teacher", attention_tokens="patches"),
    "lolcats": Matching(attention_inputs="teacher", attention_weight=1000.0),
}


@pytest.mark.parametrize("variant", OPTIONS)
def test_it_is_the_loss_of_lolcats(variant: str) -> None:
    vector = load(f"distil_{variant}")
    given = vector.parameters()
    teacher, student = Tokens("softmax").double(), Tokens(f"{__name__}:LearnedSoftmaxFeatures").double()
    for network, of_student in ((teacher, False), (student, True)):
        for i, block in enumerate(network.blocks):
            load_block(block, given, i, of_student)
    distillation = Distillation(teacher, student.train(), OPTIONS[variant])
    (tokens,) = vector.inputs(torch.float64)
    student(tokens.detach())
    errors = distillation.errors()["attention"]
    vector.check("output.block_loss", torch.stack(list(errors.values())))
    loss = torch.stack(list(errors.values())).mean() * vector.meta["options"]["factor"]
    vector.check("output.loss", loss)
    student(tokens.detach())
    loss = distillation.loss() * vector.meta["options"]["factor"] / OPTIONS[variant].attention_weight
    loss.backward()
    for name in [name for name in vector.tensors if name.startswith("grad_param.student")]:
        _, _, i, rest = name.split(".", 3)
        layer = student.blocks[int(i)].attn
        own = {
            "feature_map_q.mlp.layer": layer.mechanism.of_q,
            "feature_map_k.mlp.layer": layer.mechanism.of_k,
            "qkv.weight": layer.qkv.weight,
            "qkv.bias": layer.qkv.bias,
        }[rest]
        vector.check(name, own.grad)


def load_block(block: nn.Module, given: dict[str, Tensor], i: int, of_student: bool) -> None:
    """Loads the teacher's weights, and over them those that the student has of its own."""
    renamed = {"qkv": "attn.qkv", "proj": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
    maps = {"feature_map_q.mlp.layer": "attn.mechanism.of_q", "feature_map_k.mlp.layer": "attn.mechanism.of_k"}
    for owner in ("teacher", "student")[: 1 + of_student]:
        start = f"{owner}.{i}."
        for name, tensor in given.items():
            if name.startswith(start):
                name = name.removeprefix(start)
                layer, _, leaf = name.partition(".")
                block.load_state_dict({maps.get(name, f"{renamed.get(layer, layer)}.{leaf}"): tensor}, strict=False)


PREFIXED: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "pvt": (partial(create_backbone, {"name": "pvt_tiny", "depths": [1] * 4}, img_size=64), [0, 0, 0, 1]),
    "cait": (partial(timm.create_model, "cait_xxs24_224", img_size=32, depth=2), [0, 0]),
    "pit": (partial(timm.create_model, "pit_ti_distilled_224", img_size=64, depth=[1, 1, 1]), [2, 2, 2]),
}


@pytest.mark.parametrize("name", PREFIXED)
def test_patches_are_all_tokens_but_the_prefix_that_each_layer_has(name: str) -> None:
    create, prefixes = PREFIXED[name]
    teacher = create()
    student = linearize(teacher, "linear", img_size=64).train()
    distillation = Distillation(teacher, student, Matching(attention_tokens="patches"))
    mixed: dict[tuple[nn.Module, str], Tensor] = {}
    for network in (teacher, student):
        for layer in distillation.layers:

            def keep(_: nn.Module, args: tuple[Tensor], key: tuple[nn.Module, str] = (network, layer)) -> None:
                mixed[key] = args[0]

            network.get_submodule(layer).proj.register_forward_pre_hook(keep)
    student(images(1, 32 if name == "cait" else 64))
    for (layer, error), prefix in zip(distillation.errors()["attention"].items(), prefixes, strict=True):
        own, target = (mixed[network, layer][:, prefix:] for network in (student, teacher))
        torch.testing.assert_close(error, (own - target).square().mean(), rtol=1e-5, atol=0)


PARTS = Matching(block_weight=1.0, feature_weight=1.0, logit_weight=1.0, temperature=2.0)


def images(batch: int = 2, side: int = 32) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("of_teacher", "other"),
    [
        ({"name": "linear", "feature_map": "relu"}, {"name": "linear", "feature_map": "elu"}),
        ("focused", {"name": "focused", "focusing_factor": 4}),
        ("soft", {"name": "soft", "newton_iters": 3}),
    ],
    ids=str,
)
def test_layers_that_differ_in_options_alone_are_matched(of_teacher: Any, other: Any) -> None:
    teacher = create_backbone("deit_nano", num_classes=10, attention=of_teacher)
    student = linearize(teacher, ["hydra", other, of_teacher, None])
    assert Distillation(teacher, student).layers == ["blocks.0.attn", "blocks.1.attn"]


def test_the_parts_are_what_a_reader_computes_by_hand() -> None:
    teacher = create_backbone("deit_nano", num_classes=10)
    student = linearize(teacher, ["linear", None, "hydra", None]).double().train()
    distillation = Distillation(teacher.double(), student, PARTS)
    assert distillation.layers == ["blocks.0.attn", "blocks.2.attn"]
    logits = student(images().double())
    found = distillation.parts()
    kept: dict[str, list[Tensor]] = {}
    distillation.close()
    for network in (teacher, student):
        for name, module in network.named_modules():
            module.register_forward_hook(
                lambda _, args, out, name=name: kept.setdefault(name, []).extend([args[0], out])
            )
        network(images().double())

    def distance(name: str, at: int) -> Tensor:
        return (kept[name][at] - kept[name][2 + at]).square().mean()

    p, q = ((kept[""][at] / 2).softmax(1) for at in (1, 3))
    torch.testing.assert_close(logits, kept[""][3])
    wanted = {
        "attention": (distance("blocks.0.attn.proj", 0) + distance("blocks.2.attn.proj", 0)) / 2,
        "blocks": (distance("blocks.0", 1) + distance("blocks.2", 1)) / 2,
        "features": distance("norm", 1),
        "logits": 4 * (p * (p / q).log()).sum(1).mean(),
    }
    torch.testing.assert_close(found, wanted)
    weighted = 50 * wanted["attention"] + wanted["blocks"] + wanted["features"] + wanted["logits"]
    torch.testing.assert_close(distillation.weighted(found), weighted)


def test_with_the_inputs_of_the_teacher_attention_alone_is_trained() -> None:
    teacher = create_backbone("deit_nano", num_classes=10)
    student = linearize(teacher, "focused").train()
    distillation = Distillation(teacher, student, Matching(attention_inputs="teacher"))
    logits = student(x=images())  # by name
    assert torch.equal(logits, teacher(images()))  # what follows gets the teacher's attention
    distillation.loss().backward()
    trained = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert trained
    assert all(".attn." in name and ".attn.proj" not in name for name in trained)


@pytest.mark.parametrize("name", ["deit_nano", "swin_tiny", "vit_tiny_patch16_224"])
def test_with_the_inputs_of_the_teacher_attention_layers_run_alone_for_the_same_gradients(name: str) -> None:
    small = {"deit_nano": {}, "swin_tiny": {"depths": (1, 1, 2, 1), "embed_dim": 48}}
    if name in small:
        teacher = create_backbone({"name": name, **small[name]}, num_classes=10)
    else:
        teacher = timm.create_model(name, depth=2, img_size=32)
    student, gradients, ran = linearize(teacher, "linear").train(), [], list[str]()
    student.get_submodule("norm").register_forward_hook(lambda *_: ran.append("all of it"))
    distillation = Distillation(teacher, student, Matching(attention_inputs="teacher"))
    shown = torch.rand(2, 3, 32, 32)
    for size in (32, 32, 64) if name == "swin_tiny" else (32, 32):  # another size has another grid
        student.zero_grad()
        distillation.run(F.interpolate(shown, size=size))
        distillation.loss().backward()
        gradients.append([parameter.grad for parameter in student.parameters() if parameter.grad is not None])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert len(ran) == len(gradients) - 1


def test_the_teacher_is_left_alone_and_no_part_of_the_student() -> None:
    teacher = create_backbone("deit_nano", num_classes=10).train()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    student = linearize(teacher, "linear")
    names = set(student.state_dict())
    distillation = Distillation(teacher, student, PARTS)
    assert set(student.state_dict()) == names
    assert not teacher.training
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    student(images())
    distillation.loss().backward()
    optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in linearize(teacher, "hydra").parameters())


def test_in_evaluation_the_teacher_rests() -> None:
    teacher = create_backbone("deit_nano", num_classes=10)
    student = linearize(teacher, "linear").train()
    distillation = Distillation(teacher, student)
    calls = []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    student.eval()(images())
    assert not calls
    with pytest.raises(UserError, match=r"call student.train\(\)"):
        distillation.loss()
    student.train()(images())
    assert calls == [1]


@pytest.mark.parametrize("tokens", ["all", "patches"])
def test_a_student_that_mixes_nothing_is_at_distance_1(tokens: Literal["all", "patches"]) -> None:
    teacher = create_backbone({"name": "deit_nano", "class_token": True}, num_classes=10)
    nn.init.normal_(teacher.cls_token, std=100)  # its outputs are others than those of the patches
    student = linearize(teacher, "linear")
    with torch.no_grad():
        for parameter in (student.blocks[0].attn.qkv.weight, student.blocks[0].attn.qkv.bias):
            parameter[2 * 96 :] = 0  # the rows of v
    for training in (True, False):
        student.train(training).blocks[1].eval()  # a frozen part
        modes = [module.training for module in student.modules()]
        found = Distillation(teacher, student, Matching(attention_tokens=tokens)).distances(images())["attention"]
        assert found["blocks.0.attn"] == pytest.approx(1)
        assert found["blocks.1.attn"] != pytest.approx(1)
        assert [module.training for module in student.modules()] == modes


def test_matching_keeps_at_most_1_3_times_the_memory_of_a_step_and_nothing_when_closed() -> None:
    teacher, used = create_backbone("deit_nano", num_classes=10), []
    student = linearize(teacher, "linear").train()
    distillation = Distillation(teacher, student)

    def step(matched: bool) -> None:
        student.zero_grad()
        loss = student(images(16)).square().mean()
        (loss + distillation.loss() if matched else loss).backward()

    for matched in (True, False):
        step(matched)  # or what torch allocates the first time is counted
        used.append(peak_memory(partial(step, matched)))
        distillation.close()
    assert used[0] <= 1.3 * used[1]
    for network in (teacher, student):
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize("inputs", ["student", "teacher"])
def test_checkpointed_blocks_get_the_same_gradients(inputs: Literal["student", "teacher"]) -> None:
    teacher = create_backbone("deit_nano", num_classes=10)
    student, gradients = linearize(teacher, "focused").train(), []
    for checkpointed in (False, True):
        student.set_grad_checkpointing(checkpointed)
        student.zero_grad()
        distillation = Distillation(teacher, student, replace(PARTS, attention_inputs=inputs))
        student(images())
        distillation.loss().backward()
        gradients.append([parameter.grad for parameter in student.parameters() if parameter.grad is not None])
        distillation.close()
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("attention", list_attentions())
def test_every_attention_can_be_a_student(attention: str) -> None:
    teacher = create_backbone({"name": "deit_nano", "depth": 1}, num_classes=10)
    student = linearize(teacher, attention).train()
    distillation = Distillation(teacher, student, replace(PARTS, attention_inputs="student"))
    student(images(4))
    distillation.loss().backward()
    silent = [name for name, parameter in student.named_parameters() if parameter.grad is None]
    assert not silent
    assert all(parameter.grad.isfinite().all() for parameter in student.parameters() if parameter.grad is not None)


def test_a_copy_of_the_student_is_not_compared() -> None:
    teacher = create_backbone("deit_nano", num_classes=10)
    student = linearize(teacher, "linear").train()
    distillation = Distillation(teacher, student, replace(PARTS, attention_inputs="teacher"))
    student(images())
    calls = []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    copied = copy.deepcopy(student)
    wanted = linearize(student, "linear")  # whose layers are its own
    assert torch.equal(copied(images(4)), wanted(images(4)))
    assert not calls
    assert distillation.loss().isfinite()


def through_a_pickle(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_pickle])
def test_networks_are_copied_and_pickled_whole(copied: Callable[[nn.Module], Any]) -> None:
    module = Module()
    alone = copied(module.student)
    assert torch.equal(alone(images()), module.student(images()))
    with pytest.raises(UserError, match=r"call student.train\(\)"):
        copied(module).distillation.loss()  # of networks of its own
    other = copied(module)
    for each in (other, module):
        each.student(images())
    assert other.distillation.teacher is other.teacher
    assert torch.equal(other.distillation.loss(), module.distillation.loss())


def test_a_module_may_have_the_teacher_as_a_part() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = create_backbone({"name": "deit_nano", "proj_drop": 0.5}, num_classes=10)
            self.student = linearize(self.teacher, "softmax")
            self.distillation = Distillation(self.teacher, self.student)

    both = Both().train()
    both.student.double().eval()
    found = both.distillation.distances(images().double())
    assert not both.teacher.training
    assert set(found["attention"].values()) == {0.0}  # no dropout in the teacher, which is in double precision, too


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 3}, r"has no attention layer blocks\.3\.attn"),
        ({"depth": 5}, r"has the layer blocks\.4\.attn, which its student lacks"),
        ({"embed_dim": 48}, r"attention of blocks\.0\.attn: .*\(2, 64, 96\) and its teacher \(2, 64, 48\)"),
        ({"num_classes": 7}, r"logits of the network: .*\(2, 10\) and its teacher \(2, 7\)"),
    ],
)
def test_another_network_is_no_teacher(options: dict[str, int], message: str) -> None:
    teacher = create_backbone({"name": "deit_nano", "num_classes": 10, **options})
    student = create_backbone("deit_nano", attention="linear", num_classes=10).train()

    def loss() -> Tensor:
        distillation = Distillation(teacher, student, Matching(logit_weight=1.0))
        student(images())
        return distillation.loss()

    with pytest.raises(UserError, match=message):
        loss()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_has_the_gradients_of_the_student_alone(group: None) -> None:
    teacher, gradients = create_backbone("deit_nano", num_classes=10), []
    untrained = linearize(teacher, "focused").train()
    for wrapped in ("not", "before", "after"):
        student = copy.deepcopy(untrained)
        called: nn.Module = DistributedDataParallel(student) if wrapped == "before" else student
        distillation = Distillation(teacher, called)
        called = DistributedDataParallel(student) if wrapped == "after" else called
        for part in images(4).chunk(2):  # two steps, for DDP finds parameters without gradients in the second
            student.zero_grad()
            (called(part).square().mean() + distillation.loss()).backward()
        gradients.append([parameter.grad for parameter in student.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


class Module(LightningModule):
    """As a user writes one, with the teacher as a part, and checkpointed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = create_backbone("deit_nano", num_classes=10).requires_grad_(False)
        self.student = linearize(self.teacher, "linear")
        self.student.set_grad_checkpointing()
        self.distillation = Distillation(self.teacher, self.student)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        matched = self.student(batch).square().mean() + self.distillation.loss()
        self.losses.append(matched.item())
        return matched

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), 1e-3)


@pytest.mark.parametrize("precision", ["bf16-mixed"])
def test_it_works_in_a_module_of_lightning(tmp_path: Path, precision: Literal["32-true", "bf16-mixed"]) -> None:
    torch.manual_seed(0)
    module = Module()
    before = copy.deepcopy(module.teacher.state_dict())
    runner = trainer(tmp_path, max_epochs=3, accumulate_grad_batches=2, precision=precision)
    runner.fit(module, DataLoader(images(8), 2))
    assert runner.global_step == 6
    assert sum(module.losses[-4:]) < sum(module.losses[:4])
    for name, weight in module.teacher.state_dict().items():
        torch.testing.assert_close(weight, before[name].to(weight.dtype), rtol=0, atol=0)


def test_the_features_of_all_branches_are_matched() -> None:
    teacher = timm.create_model("crossvit_9_240", num_classes=5, depth=[[1, 2, 0]])
    student = linearize(teacher, "linear", 240)
    found = Distillation(teacher, student, Matching(feature_weight=1.0)).distances(images(1, 240))
    assert set(found["features"]) == {"norm.0", "norm.1"}
