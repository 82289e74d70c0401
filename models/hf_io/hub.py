"""Model folders by path, or by their name on the Hugging Face Hub."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from models.hf_io.safetensors_folder import (
    WeightsError,
    is_hub_snapshot,
    read_json,
    weight_files,
)
from stacked_remat._messages import shown

ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = "adapter_model.safetensors"
REPOSITORY = re.compile(r"(?![.-])[\w.-]+/[\w.-]+")
_BESIDE_WEIGHTS = ("*.json", "*.txt", "*.jinja")


def model_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of a model: `name` itself where there is one, else the Hub's,
    downloaded or from its cache.

    On the Hub a name may end in `@revision`. Without `weights` only JSON and texts are
    fetched. Other formats of the weights, and folders in the folder, are not.
    """
    # A folder here goes before a repository of the same name.
    if _is_folder(name):
        return Path(name).expanduser()
    repository, _, revision = name.partition("@")
    if not REPOSITORY.fullmatch(repository):
        raise FileNotFoundError(
            f"There is no folder {name or repr(name)}, and it is not a name on the"
            " Hugging Face Hub, which would be owner/model."
        )
    # The index says which files the weights are in, so it comes first.
    folder = _fetched(name, repository, revision)
    if not weights:
        return folder
    files = (
        [ADAPTERS]
        if _has_adapters(folder)
        else [glob.escape(file) for file in weight_files(folder)]
    )
    return _fetched(name, repository, revision, files)


def adapted_model(root: Path, name: str) -> str | None:
    """The name of the model that a folder's adapters are for; None for a folder of
    another kind.

    Adapters of the Hub, by whose `name` the folder was found, may only be for a model
    of the Hub.
    """
    if not _has_adapters(root):
        return None
    settings = read_json(root / ADAPTER_CONFIG)
    base = settings.get("base_model_name_or_path")
    revision = settings.get("revision")
    if not base or not isinstance(base, str):
        raise WeightsError(
            f"{root / ADAPTER_CONFIG} has no base_model_name_or_path: name the model"
            " there."
        )
    is_local = _is_folder(base)
    is_published = REPOSITORY.fullmatch(base.partition("@")[0]) is not None
    # What is downloaded must not choose a folder of this machine.
    is_downloaded = is_hub_snapshot(root) or not _is_folder(name)
    if is_downloaded and (is_local or not is_published):
        raise WeightsError(
            f"The adapters {name} from the Hugging Face Hub are for {shown(base)},"
            " which is a folder here or no name on the Hub. To use them with a model"
            f" on this machine, copy them to a folder (`hf download {name} --local-dir"
            " FOLDER`), name that model as base_model_name_or_path in its"
            f" {ADAPTER_CONFIG}, and name the folder instead: --model FOLDER, or"
            " initialize_from_hf."
        )
    return base if revision is None or is_local else f"{base}@{revision}"


def _is_folder(name: str) -> bool:
    """Whether a name is of a folder here; false for "", which `Path` takes for the
    current folder, and for what no file system can have as a name.
    """
    return os.path.isdir(os.path.expanduser(name))


def _has_adapters(root: Path) -> bool:
    return not (root / "config.json").is_file() and (root / ADAPTER_CONFIG).is_file()


def push_folder(folder: Path, repository: str, *, private: bool = False) -> str:
    """Uploads a folder to a repository of models on the Hub, made if it is new; returns
    its address.
    """
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    try:
        found = hub.create_repo(repository, private=private or None, exist_ok=True)
        hub.upload_folder(
            repo_id=found.repo_id,
            folder_path=folder,
            commit_message="Upload of stacked_remat",
        )
    except Exception as error:  # of the Hub, or of whichever client reaches it
        raise WeightsError(
            f"{folder} is written, and could not be uploaded to {repository}:"
            f" {str(error).rstrip('.')}. Check the name, and that `hf auth login` gave"
            f" a token that may write; then `hf upload {repository} {folder}`."
        ) from error
    return str(found)


def _fetched(
    name: str, repository: str, revision: str, files: Sequence[str] = ()
) -> Path:
    """The folder, with what is beside weights at its top, and with these files."""
    from huggingface_hub import errors, snapshot_download

    try:
        found = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=[*_BESIDE_WEIGHTS, *files],
            ignore_patterns=[f"*/{pattern}" for pattern in _BESIDE_WEIGHTS],
        )
    except (
        errors.HFValidationError,
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
    ) as error:
        raise WeightsError(
            f"{name} is not a folder here, and it could not be fetched from the Hugging"
            " Face Hub. Check the name, the network, and `hf auth login` for gated"
            f" models. The Hub's client says: {' '.join(str(error).split())}"
        ) from error
    return Path(found)
