"""Downloads files of weights from the Hugging Face hub."""

import re
from pathlib import Path

from linvit.errors import UserError

PREFIX = "hf-hub:"
NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ("model.safetensors", "pytorch_model.safetensors", "pytorch_model.bin", "model.pth", "model.pt")


def is_repository(source: str) -> bool:
    """Whether a source names a repository: `hf-hub:owner/name`, or `owner/name` where there is no such folder."""
    return source.startswith(PREFIX) or (NAME.fullmatch(source) is not None and not Path(source).parent.exists())


def download(source: str) -> Path:
    """Downloads the weights of a repository and returns the path of the local copy."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    path, _, revision = source.removeprefix(PREFIX).partition("@")
    owner, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    reason: Exception | None = None
    for candidate in [file] if file else FILES:
        try:
            return Path(hf_hub_download(f"{owner}/{name}", candidate, revision=revision or None))
        except EntryNotFoundError as error:
            reason = error
        except (OSError, ValueError) as error:
            reason = error
            break
    looked = file or ", ".join(FILES)
    raise UserError(
        f"no weights from '{source}': {' '.join(str(reason).split())[:300]}\n"
        f"  looked for {looked} in the repository '{owner}/{name}' of the hub. Name another file with "
        f"{PREFIX}{owner}/{name}/FILE, or download it and give its path"
    ) from reason
