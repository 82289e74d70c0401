"""Model folders by path, or by their name on the Hugging Face Hub."""

import re
from pathlib import Path

from models.hf_io.safetensors_folder import WeightsError
from stacked_remat._messages import shown

_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")


def model_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of a model: `name` itself where there is one, else the Hub's, downloaded or from its cache.

    Args:
        name: a path, or `owner/model` on the Hub, with `@revision` for one that is not its newest.
        weights: whether its weights are needed; if not, only the Hub's JSON files are fetched.

    Raises:
        FileNotFoundError: there is no such folder, and the name can't be one on the Hub.
        WeightsError: the Hub does not have it, or denies access.
    """
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null byte, no permission
        raise FileNotFoundError(f"{shown(name)} can't be a folder: {error}.") from error
    repository, _, revision = name.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository) or name.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"There is no folder {name}, and it is not a name on the Hugging Face Hub, which would be "
            f"owner/model."
        )
    import huggingface_hub
    import huggingface_hub.errors

    try:
        found = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_FILES if weights else _FILES[:1])
        )
    except (
        huggingface_hub.errors.HFValidationError,
        huggingface_hub.errors.HfHubHTTPError,
        huggingface_hub.errors.LocalEntryNotFoundError,
    ) as error:
        raise WeightsError(
            f"{name} is not a folder here, and it could not be fetched from the Hugging Face Hub: "
            f"{str(error).rstrip('.')}. Check the name, the network, and `hf auth login` for gated models."
        ) from error
    return Path(found)
