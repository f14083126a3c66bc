"""What may be hostile is opened in few places, where it is checked."""

import ast
from pathlib import Path

import linvit

ROOT = Path(linvit.__file__).parent
DOORS = {  # what opens something: the files that may call it
    "torch.load": {"weights/torch_file.py"},
    "pickle.load": set(),
    "pickle.loads": {"testing/behaviour.py"},  # what they have just pickled
    "Image.open": {"data/transforms/decode.py"},
    "fsspec.open": {"data/sources/read.py", "data/sources/stream.py", "tasks/safe_loading.py"},
    "jsonargparse.get_loader": {"yaml_text.py"},
    "yaml.load": {"yaml_text.py"},
    "yaml.safe_load": {"model_info.py"},  # tables that come with linvit
    "np.load": set(),
    "torch.hub.load_state_dict_from_url": set(),
}


def test_nothing_goes_around_the_doors():
    found: dict[str, set[str]] = {call: set() for call in DOORS}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in DOORS:
                found[called].add(path.relative_to(ROOT).as_posix())
    assert found == DOORS
