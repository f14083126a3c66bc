"""Models of transformers whose attention was replaced, read from the folders of their `save_pretrained`."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from linvit.backbones.replace_attention import replace_attention
from linvit.backbones.transformers.hosts import REPLACED
from linvit.backbones.transformers.model import import_transformers
from linvit.errors import UserError
from linvit.io.reading import read_text
from linvit.registry.entries import restrict_imports_to
from linvit.weights.read import content_of


def load_transformers(folder: str | Path) -> nn.Module:
    """Loads a model of transformers whose attention `linvit.replace_attention` or `linvit.linearize` has replaced.

    `from_pretrained` of transformers would build the model with its own attention and drop the other weights.
    Nothing in the folder is executed.

    Args:
        folder: Folder that `save_pretrained` of the model wrote.

    Returns:
        The model, of the class that was saved, in evaluation mode.

    Raises:
        UserError: If transformers is not installed, or the folder does not hold such a model.

    Example:
        >>> student = linvit.linearize(AutoModel.from_pretrained("facebook/dinov2-small"), "hedgehog")
        >>> student.save_pretrained("student")
        >>> student = linvit.load_transformers("student")
    """
    transformers = import_transformers()
    from transformers.core_model_loading import revert_weight_conversion

    path = Path(folder)
    files = sorted(path.glob("model*.safetensors"))
    if not files or not (path / "config.json").is_file():
        raise UserError(f"'{path}' was not written by save_pretrained: it needs config.json and model.safetensors")
    options = json.loads(read_text(path / "config.json"))
    replaced, names = options.pop(REPLACED, None), options.get("architectures") or [""]
    model: Any = getattr(transformers, names[0], None)
    if not replaced:
        raise UserError(
            f"the model in '{path}' has its own attention: load it by transformers.AutoModel.from_pretrained('{path}')"
        )
    known = isinstance(model, type) and issubclass(model, transformers.PreTrainedModel)
    if not known:
        raise UserError(f"transformers {transformers.__version__} has no model {names[0]!r}, which '{path}' names")
    network = model(model.config_class.from_dict(options))
    with restrict_imports_to(()):
        for one in replaced:
            replace_attention(network, one["attention"], one["img_size"])
    state = {name: tensor for file in files for name, tensor in content_of(file)[0].items()}
    own = network.state_dict()
    if state.keys() != own.keys():  # files have names of earlier versions of transformers
        current = {id(tensor): name for name, tensor in own.items()}
        before = revert_weight_conversion(network, dict(own))
        state = {current[id(tensor)]: state[name] for name, tensor in before.items() if name in state}
    lacking = [name for name, value in own.items() if getattr(state.get(name), "shape", None) != value.shape]
    if lacking:
        raise UserError(f"{len(lacking)} tensors of the model are not in '{path}', or have other shapes: {lacking[0]}")
    network.to(state[next(iter(own))].dtype).load_state_dict(state)
    return network.eval()  # type: ignore[no-any-return]
