"""Students of transformers' models: distilled, saved and loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import linvit
from linvit import UserError
from linvit.linearization.distillation import Matching
from tests.backbones.transformers.families import MODELS, inputs_of, tiny, tokens

MATCHED = Matching(block_weight=1.0)


@pytest.mark.parametrize("family", MODELS)
def test_a_student_comes_nearer_and_is_loaded_bit_for_bit(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    teacher = tiny(family)
    inputs = inputs_of(family)
    images = inputs["pixel_values"]
    student = linvit.linearize(teacher, "linear")
    if family != "ViTMAE":  # whose own forward draws patches
        same = linvit.Distillation(teacher, linvit.linearize(teacher, "softmax"), MATCHED)
        assert max(error for part in same.distances(images).values() for error in part.values()) < 1e-9
        same.close()
    distillation = linvit.Distillation(teacher, student.train())
    optimiser = torch.optim.Adam(student.parameters(), 3e-3)
    losses = []
    for _ in range(20):
        student(**inputs)
        losses.append(distillation.loss())
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.9 * losses[0]
    distillation.close()
    expected = tokens(student.eval(), inputs)
    for original in (True, False):
        student.save_pretrained(tmp_path / str(original), save_original_format=original)
        assert torch.equal(tokens(linvit.load_transformers(tmp_path / str(original)), inputs), expected)


def test_a_student_is_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    student = linvit.linearize(tiny("ViT").bfloat16(), ["focused", None], 32)
    student.save_pretrained(tmp_path)
    images = torch.randn(1, 3, 32, 32).bfloat16()
    torch.save({"images": images, "expected": student(images).last_hidden_state}, tmp_path / "expected.pt")
    program = (
        "import sys, torch, linvit; saved = torch.load(sys.argv[1] + '/expected.pt');"
        "found = linvit.load_transformers(sys.argv[1])(saved['images']).last_hidden_state;"
        "print(torch.equal(found, saved['expected']))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was not written by save_pretrained"):
        linvit.load_transformers(tmp_path)
    tiny("ViT").save_pretrained(tmp_path / "own")
    with pytest.raises(UserError, match="has its own attention: load it by"):
        linvit.load_transformers(tmp_path / "own")
    linvit.linearize(tiny("ViT"), "linear").save_pretrained(tmp_path / "student")
    path = tmp_path / "student" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["pipeline"]}))
    with pytest.raises(UserError, match="no model 'pipeline'"):
        linvit.load_transformers(path.parent)
    path.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match="tensors of the model are not in"):
        linvit.load_transformers(path.parent)


def test_checkpointing_and_compilation_change_nothing() -> None:
    torch.manual_seed(0)
    model = linvit.replace_attention(tiny("DINOv2"), "focused").train()
    images = torch.randn(2, 3, 32, 48)
    found = []
    for way in ("plain", "checkpointed", "compiled"):
        model.zero_grad()
        if way == "checkpointed":
            model.activation_checkpointing_enable()
        elif way == "compiled":
            model.activation_checkpointing_disable()
        run = torch.compile(model, backend="eager") if way == "compiled" else model
        run(images).last_hidden_state.square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert len(found[0]) > 30
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)
