"""Finds a tokenizer by its name in a config: `byte`, a folder, a file, or a name on the Hugging Face Hub."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ..._files import read_json_fields
from ..errors import DataError
from .hugging_face_tokenizer import HuggingFaceTokenizer
from .tokenizers import ByteTokenizer, Tokenizer

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL_TOKENS = "special_tokens_map.json"
_Finder: TypeAlias = Callable[[str], Path | None]
"""From the usual name of a tokenizer's file to its path; None if there is no such file."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")


def load_tokenizer(name: str, chat_date: str | None = None) -> Tokenizer:
    """The tokenizer that a config's `data.tokenizer` names.

    Args:
        name: `byte`; a folder with a `tokenizer.json`; such a file; or a name on the Hugging Face Hub, with
            `@revision` for one that is not the newest.
        chat_date: the day that its chat template takes for today, as `ChatTemplate` takes it.

    Raises:
        DataError: there is no such tokenizer, it can't be read, it has no end-of-text token, or a package is
            missing.
    """
    if name == "byte":
        return ByteTokenizer()
    files = _files(name)
    config = {**_fields(name, files.get(_SPECIAL_TOKENS)), **_fields(name, files.get(_CONFIG))}
    own = files.get(_TEMPLATE)
    template = _template(name, config.get("chat_template")) if own is None else _text(own)
    return HuggingFaceTokenizer(name, _text(files[_TOKENIZER]), config, template, chat_date)


def read_tokenizer_files(name: str) -> dict[str, str]:
    """The texts of a tokenizer's files, by the names that Hugging Face's libraries look for.

    Args:
        name: as for `load_tokenizer`; `byte` has no files.

    Raises:
        DataError: there is no such tokenizer, or it can't be read.
    """
    return {} if name == "byte" else {file: _text(path) for file, path in _files(name).items()}


def _files(name: str) -> dict[str, Path]:
    """The files that a tokenizer has, by their usual names."""
    find = _finder(name)
    found = {file: find(file) for file in (_TOKENIZER, _CONFIG, _SPECIAL_TOKENS, _TEMPLATE)}
    if found[_TOKENIZER] is None:
        raise DataError(
            f"data.tokenizer = {name!r} has no {_TOKENIZER}. Convert older kinds of tokenizers with "
            f"transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    return {file: path for file, path in found.items() if path is not None}


def _finder(name: str) -> _Finder:
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise DataError(f"data.tokenizer = {name!r}: {error} Write the whole path.") from error

    def find(file: str) -> Path | None:
        beside = path / file if path.is_dir() else path.with_name(file)
        found = path if file == _TOKENIZER and path.is_file() else beside
        return found if found.is_file() else None

    if path.is_dir() or path.is_file():
        return find
    if _HUB_NAME.fullmatch(name) and not name.endswith(".json"):
        return lambda file: _fetch(name, file)
    raise DataError(
        f"data.tokenizer = {name!r} is neither `byte`, nor a folder or tokenizer.json that exists, nor a "
        f"name on the Hugging Face Hub (owner/name)."
    )


def _template(name: str, entry: Any) -> str | None:
    """The chat template of a tokenizer's config, where it may be one of several."""
    if isinstance(entry, list) and all(isinstance(one, dict) for one in entry):
        entry = {one.get("name"): one.get("template") for one in entry}.get("default")
    if entry is None or isinstance(entry, str):
        return entry
    raise DataError(
        f"`chat_template` in the {_CONFIG} of data.tokenizer = {name!r} is of type {type(entry).__name__}; "
        f"expected a text, or a list of objects with `name` and `template`, one of them named `default`."
    )


def _fields(name: str, path: Path | None) -> dict[str, Any]:
    try:
        return {} if path is None else read_json_fields(path)
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer = {name!r}: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"Can't read {path} of data.tokenizer: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} of data.tokenizer is not UTF-8 text: {error}. Get it again.") from error


def _fetch(name: str, file: str) -> Path | None:
    """A file of a repository, from the Hub or its local cache; None if there is no such file."""
    try:
        import huggingface_hub as hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise DataError(
            f"data.tokenizer = {name!r} is a name on the Hugging Face Hub, which needs huggingface_hub: "
            f"pip install 'stacked_remat[data]'."
        ) from error
    repository, _, revision = name.partition("@")
    try:
        return Path(hub.hf_hub_download(repository, file, revision=revision or None))
    except hub.errors.LocalEntryNotFoundError as error:
        cached = hub.try_to_load_from_cache(repository, file, revision=revision or None)
        known_to_be_missing = cached is not None and not isinstance(cached, str)
        if file != _TOKENIZER and (hub.constants.HF_HUB_OFFLINE or known_to_be_missing):
            return None
        raise DataError(_not_on_hub(name, f"the Hub can't be reached: {error}")) from error
    except hub.errors.EntryNotFoundError:
        return None
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError, OSError) as error:
        raise DataError(_not_on_hub(name, str(error))) from error


def _not_on_hub(name: str, reason: str) -> str:
    return (
        f"data.tokenizer = {name!r} is not a local folder or file, and was not found on the Hugging Face "
        f"Hub: {reason}. Check the name, log in with `hf auth login` for a gated one, or give a local folder."
    )
