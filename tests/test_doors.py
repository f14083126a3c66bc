"""What may be hostile is opened in few places, where it is checked."""

import ast
from pathlib import Path

import pytest

import linvit

ROOT = Path(linvit.__file__).parent
DOORS = {  # what opens something: the files that may call it
    "torch.load": {"weights/torch_file.py"},
    "pickle.load": set(),
    "pickle.loads": {"testing/behaviour.py"},  # what they have just pickled
    "Image.open": {"data/transforms/decode.py"},
    "fsspec.open": {"data/sources/read.py", "data/sources/stream.py", "tasks/safe_loading.py"},
    "jsonargparse.get_loader": {"runs/yaml_text.py"},
    "yaml.load": {"runs/yaml_text.py"},
    "yaml.safe_load": {"registry/model_info.py"},  # tables that come with linvit
    "np.load": set(),
    "torch.hub.load_state_dict_from_url": set(),
}


@pytest.fixture(scope="module")
def calls():
    """All calls in the source: file, what is called, the call."""
    every = ((path, node) for path in ROOT.rglob("*.py") for node in ast.walk(ast.parse(path.read_bytes())))
    return [
        (path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node)
        for path, node in every
        if isinstance(node, ast.Call)
    ]


def test_nothing_goes_around_the_doors(calls):
    found: dict[str, set[str]] = {call: set() for call in DOORS}
    for file, called, _ in calls:
        if called in DOORS:
            found[called].add(file)
    assert found == DOORS


READERS = {  # of files by their paths, and what may call them besides `linvit.io.reading`: the files are checked before
    "read_bytes": {"registry/source.py"},  # of modules that are installed
    "read_text": {"io/machine.py", "runs/conditions.py", "runs/configs.py"}
    | {"attention/kernels/choice.py", "cli/compare/run.py", "cli/training/help.py"},  # the system's files, and linvit's
    "open": {"registry/model_info.py", "weights/torch_file.py"},  # linvit's tables; `torch_file.load` checks
    "zipfile.ZipFile": {"weights/torch_file.py"},
    "zipfile.is_zipfile": {"weights/torch_file.py"},
    "safe_open": {"inference/description.py", "weights/read.py"},
    "torch.export.load": {"evaluation/model.py", "inference/export.py"},
    "rasterio.open": {"io/rasters.py"},
    "pyarrow.memory_map": {"data/sources/splits.py", "data/sources/stream.py"},  # `check_tables` looks before
    "pyarrow.parquet.read_metadata": {"data/sources/splits.py", "data/sources/stream.py"},
    "datasets.load_from_disk": {"data/sources/splits.py"},
    "datasets.load_dataset": {"data/sources/splits.py"},
    "np.loadtxt": {"experiments/compare/results.py"},  # of a text
    "np.fromfile": set(),
    "torch.jit.load": set(),
    "safetensors.torch.load_file": set(),
}
OTHERS = ("os.open", "file.open", "opened.open")  # descriptors, and what is in memory


def test_files_are_read_by_one_function_which_refuses_pipes_and_devices(calls):
    around = set()
    for file, called, node in calls:
        name = called if called in READERS else called.rpartition(".")[2]  # a method of a path
        method = called != name or name != "read_text"  # which is also the function of `linvit.io.reading`
        if name in READERS and method and called not in (*DOORS, *OTHERS) and not (name == "open" and _writes(node)):
            around |= {(file, called)} if file not in {*READERS[name], "io/reading.py"} else set()
    assert around == set(), "use linvit.io.reading: read_regular, read_text or check_regular"


def _writes(call: ast.Call) -> bool:
    modes = [mode.value for mode in call.args if isinstance(mode, ast.Constant)]
    modes += ["w"] if any(isinstance(mode, ast.IfExp) for mode in call.args) else []
    return any(set("wax") & set(str(mode)) for mode in modes)
