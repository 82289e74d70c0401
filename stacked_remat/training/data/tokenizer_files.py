"""Finding a tokenizer by what the config calls it: built in, a folder, a file, or a name on the hub."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from .data_error import DataError
from .hugging_face_tokenizer import HuggingFaceTokenizer
from .tokenizers import ByteTokenizer, Tokenizer

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL_TOKENS = "special_tokens_map.json"
_LARGEST = 2**28  # bytes of a file; tokenizers of 250,000 tokens have 2**25
_Reader: TypeAlias = Callable[[str], str | None]
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a config's `data.tokenizer` names.

    Args:
        name: `byte`; a folder with a `tokenizer.json`; such a file; or a name on the Hugging Face hub, with
            `@revision` if it is not to be the newest.

    Raises:
        DataError: there is no such tokenizer, it can't be read, it names no token for the end of a text, or a
            package is missing.
    """
    return ByteTokenizer() if name == "byte" else _load(name, _reader(name))


def read_tokenizer_files(name: str) -> dict[str, str]:
    """The texts of a tokenizer's files, by the names that Hugging Face's libraries look for.

    Args:
        name: as `load_tokenizer` takes it; `byte` has no files.

    Raises:
        DataError: there is no such tokenizer, or it can't be read.
    """
    if name == "byte":
        return {}
    read = _reader(name)
    found = {file: read(file) for file in (_TOKENIZER, _CONFIG, _SPECIAL_TOKENS, _TEMPLATE)}
    if found[_TOKENIZER] is None:
        raise _without_definition(name)
    return {file: text for file, text in found.items() if text is not None}


def _reader(name: str) -> _Reader:
    """What gives a file of the tokenizer by its usual name, or None if there is no such file."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise DataError(f"data.tokenizer = {name!r}: {error} Write the whole path.") from error
    if path.is_dir():
        return lambda file: _read_text(path / file)
    if path.is_file():
        return lambda file: _read_text(path if file == _TOKENIZER else path.with_name(file))
    if _HUB_NAME.fullmatch(name) and not name.endswith(".json"):
        return lambda file: _read_from_hub(name, file)
    raise DataError(
        f"data.tokenizer = {name!r} is neither `byte`, nor a folder or tokenizer.json that exists, nor a "
        f"name on the Hugging Face hub (owner/name)."
    )


def _load(name: str, read: _Reader) -> HuggingFaceTokenizer:
    definition = read(_TOKENIZER)
    if definition is None:
        raise _without_definition(name)
    config = {**_parse_json(name, _SPECIAL_TOKENS, read), **_parse_json(name, _CONFIG, read)}
    template = read(_TEMPLATE) or _template(name, config.get("chat_template"))
    return HuggingFaceTokenizer(name, definition, config, template)


def _template(name: str, entry: Any) -> str | None:
    """The chat template that a config names, by itself or among several."""
    if isinstance(entry, list) and all(isinstance(one, dict) for one in entry):
        entry = {one.get("name"): one.get("template") for one in entry}.get("default")
    if entry is None or isinstance(entry, str):
        return entry
    raise DataError(
        f"`chat_template` in the {_CONFIG} of data.tokenizer = {name!r} is of type {type(entry).__name__}; "
        f"expected a text, or a list of objects with `name` and `template`, one of them named `default`."
    )


def _without_definition(name: str) -> DataError:
    return DataError(
        f"data.tokenizer = {name!r} has no {_TOKENIZER}. Older kinds of tokenizers are converted with "
        f"transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
    )


def _parse_json(name: str, file: str, read: _Reader) -> dict[str, Any]:
    text = read(file)
    try:
        fields = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"The {file} of data.tokenizer = {name!r} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(
            f"The {file} of data.tokenizer = {name!r} holds {type(fields).__name__}, not an object with keys."
        )
    return fields


def _read_text(path: Path) -> str | None:
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise DataError(
                f"{path} of data.tokenizer has more than {_LARGEST >> 20} MiB; no file of a tokenizer is."
            )
        return text.decode("utf-8")
    except OSError as error:
        raise DataError(f"Can't read {path} of data.tokenizer: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} of data.tokenizer is no UTF-8 text: {error}. Get it again.") from error


def _read_from_hub(name: str, file: str) -> str | None:
    """The text of a repository's file, from the hub or its local cache; None if there is no such file."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise DataError(
            f"data.tokenizer = {name!r} is looked for on the Hugging Face hub, which takes huggingface_hub: "
            f"pip install 'stacked_remat[data]'."
        ) from error
    repository, _, revision = name.partition("@")
    try:
        path = huggingface_hub.hf_hub_download(repository, file, revision=revision or None)
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        cached = huggingface_hub.try_to_load_from_cache(repository, file, revision=revision or None)
        known_to_be_missing = cached is not None and not isinstance(cached, str)
        if file != _TOKENIZER and (huggingface_hub.constants.HF_HUB_OFFLINE or known_to_be_missing):
            return None
        raise DataError(_not_on_hub(name, f"the hub can't be reached: {error}")) from error
    except huggingface_hub.errors.EntryNotFoundError:
        return None
    except (
        huggingface_hub.errors.HfHubHTTPError,
        huggingface_hub.errors.HFValidationError,
        OSError,
    ) as error:
        raise DataError(_not_on_hub(name, str(error))) from error
    return _read_text(Path(path))


def _not_on_hub(name: str, reason: str) -> str:
    return (
        f"data.tokenizer = {name!r} is no folder or file here, and was not found on the Hugging Face hub: "
        f"{reason}. Check the name, log in with `hf auth login` for a gated one, or give a local folder."
    )
