"""Finds a tokenizer by its name in a config: `byte`, a folder, a file, or a name on the
Hugging Face Hub.
"""

import re
from pathlib import Path
from typing import Any

from ..._files import read_json_fields
from ..errors import DataError
from ..extra import optional
from .hugging_face_tokenizer import HuggingFaceTokenizer
from .tokenizers import ByteTokenizer, Tokenizer

_TOKENIZER, _CONFIG, _TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_SPECIAL_TOKENS = "special_tokens_map.json"
_FILES = [_TOKENIZER, _CONFIG, _SPECIAL_TOKENS, _TEMPLATE]
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")


def load_tokenizer(
    name: str | None, chat_date: str | None = None, *, rows: int | None = None
) -> Tokenizer:
    """The tokenizer that a config's `data.tokenizer` names.

    Args:
        name: `byte`; a folder with a `tokenizer.json`; such a file; or a name on the
            Hugging Face Hub, with `@revision` for one that is not the newest. None
            stands for `byte`.
        chat_date: the day that its chat template takes for today, as `ChatTemplate`
            takes it.
        rows: of the embedding of its model. Added tokens beyond them are refused where
            a text has one.

    Raises:
        DataError: there is no such tokenizer, it can't be read, it has no end-of-text
            token, its vocabulary has more tokens than the model, or a package is
            missing.
    """
    found = (
        ByteTokenizer()
        if name in (None, "byte")
        else _pretrained(name, chat_date, rows)
    )
    if rows is not None and found.vocab_size > rows:
        raise DataError(
            f"data.tokenizer = {name!r} has {found.vocab_size} tokens, and the"
            f" embedding of the model {rows} rows. Use the model's own tokenizer, or"
            " for a new model a larger vocab_size."
        )
    return found


def _pretrained(name: str, chat_date: str | None, rows: int | None) -> Tokenizer:
    files, config = _files(name), {}
    for file in (_SPECIAL_TOKENS, _CONFIG):
        try:
            config |= read_json_fields(files[file]) if file in files else {}
        except (OSError, ValueError) as error:
            raise DataError(f"data.tokenizer = {name!r}: {error}") from error
    template = (
        _text(files[_TEMPLATE])
        if _TEMPLATE in files
        else _templates(config.get("chat_template"), name)
    )
    return HuggingFaceTokenizer(
        name, _text(files[_TOKENIZER]), config, template, chat_date, rows
    )


def _templates(given: Any, name: str) -> str | dict[str, str] | None:
    """The chat template of a `tokenizer_config.json`, or several by name."""
    if given is None or isinstance(given, str):
        return given
    named = given
    if isinstance(given, list) and all(isinstance(own, dict) for own in given):
        named = {own.get("name"): own.get("template") for own in given}
    if not isinstance(named, dict) or not all(
        isinstance(text, str) for own in named.items() for text in own
    ):
        raise DataError(
            f"data.tokenizer = {name!r}: `chat_template` in its {_CONFIG} is neither a"
            " text nor a list of "
            '{"name": ..., "template": ...}. Correct it, or write the template to a'
            f" {_TEMPLATE} beside it."
        )
    return named


def read_tokenizer_files(name: str) -> dict[str, str]:
    """The texts of a tokenizer's files, by the names that Hugging Face's libraries look
    for.

    Args:
        name: as for `load_tokenizer`; `byte` has no files.

    Raises:
        DataError: there is no such tokenizer, or it can't be read.
    """
    return (
        {}
        if name == "byte"
        else {file: _text(path) for file, path in _files(name).items()}
    )


def _files(name: str) -> dict[str, Path]:
    """The files that a tokenizer has, by their usual names."""
    path = Path(name).expanduser()
    if path.is_file():
        folder, own = path.parent, {_TOKENIZER: path}
    elif path.is_dir():
        folder, own = path, {}
    elif _HUB_NAME.fullmatch(name) and not name.endswith(".json"):
        hub = optional("huggingface_hub", f"data.tokenizer = {name!r}")
        repository, _, revision = name.partition("@")
        try:  # from the Hub or its local cache
            options = {"revision": revision or None, "allow_patterns": _FILES}
            folder, own = Path(hub.snapshot_download(repository, **options)), {}
        except (
            OSError,
            ValueError,
        ) as error:  # those of the client are one or the other
            raise DataError(
                f"data.tokenizer = {name!r} is not a local folder or file, and could"
                f" not be fetched from the Hugging Face Hub: {error}. Check the name"
                " and the network, log in with `hf auth login` for a gated one, or"
                " give a local folder."
            ) from error
    else:
        raise DataError(
            f"data.tokenizer = {name!r} is neither `byte`, nor a folder or"
            " tokenizer.json that exists, nor a name on the Hugging Face Hub"
            " (owner/name)."
        )
    found = {file: folder / file for file in _FILES if (folder / file).is_file()} | own
    if _TOKENIZER not in found:
        raise DataError(
            f"data.tokenizer = {name!r} has no {_TOKENIZER}. Convert older kinds of"
            " tokenizers with transformers,"
            " AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), and name"
            " that folder."
        )
    return found


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(
            f"Can't read {path} of data.tokenizer: {error.strerror}."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} of data.tokenizer is not UTF-8 text: {error}. Get it again."
        ) from error
