"""What benchmarks compare with is what the authors' code computes."""

import importlib.util
from pathlib import Path

import torch

from tests.golden_files import Golden, of_case

FILE = Path(__file__).parents[1] / "benchmarks" / "lean.py"


@of_case("focused_swin")
def test_the_authors_focused_attention_of_the_benchmark_equals_their_code(golden: Golden) -> None:
    spec = importlib.util.spec_from_file_location("lean", FILE)
    assert spec is not None
    assert spec.loader is not None
    lean = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lean)
    official = golden.constructor
    layer = lean.AuthorsFocused(official["dim"], tuple(official["window_size"]), official["num_heads"])
    torch.nn.init.zeros_(layer.qkv.bias)
    layer.load_state_dict(golden.parameters(), strict=False)  # one has no bias
    golden.check_call(layer(*(given := golden.inputs(torch.float32))), given)
    golden.check_parameters(layer, str)
