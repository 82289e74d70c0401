"""Finds a tokenizer by its name in a config: `byte`, a folder, a file, or a name on the
Hugging Face Hub.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._files import read_json_fields
from ..errors import DataError
from ..extra import optional
from .hugging_face_tokenizer import HuggingFaceTokenizer
from .tokenizers import ByteTokenizer, Tokenizer

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS = "special_tokens_map.json"
_FILES = [_TOKENIZER, _CONFIG, _SPECIAL_TOKENS, _TEMPLATE]
_FURTHER_TEMPLATES = "additional_chat_templates/*.jinja"  # by their names
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
    tokenizer = (
        ByteTokenizer()
        if name in (None, "byte")
        else _pretrained(name, chat_date, rows)
    )
    # JAX clamps an index beyond an array: a token without a row would train the last
    # one.
    if rows is not None and tokenizer.vocab_size > rows:
        raise DataError(
            f"data.tokenizer = {name!r} has {tokenizer.vocab_size} tokens, and the"
            f" embedding of the model {rows} rows. Use the model's own tokenizer, or"
            " for a new model a larger vocab_size."
        )
    return tokenizer


def _pretrained(name: str, chat_date: str | None, rows: int | None) -> Tokenizer:
    files = _files(name)
    config = {}
    # The config counts where both have a token, as in transformers.
    for file in (_SPECIAL_TOKENS, _CONFIG):
        try:
            config |= read_json_fields(files[file]) if file in files else {}
        except (OSError, ValueError) as error:
            raise DataError(f"data.tokenizer = {name!r}: {error}") from error
    template = _template_files(files)
    if template is None:
        template = _templates(config.get("chat_template"), name)
    return HuggingFaceTokenizer(
        name, _text(files[_TOKENIZER]), config, template, chat_date, rows
    )


def _template_files(files: Mapping[str, Path]) -> str | dict[str, str] | None:
    """The chat template that is a file of its own, or several by name. As in
    transformers, the config's count only if there are none.
    """
    templates = {}
    for file, path in files.items():
        if file == _TEMPLATE:
            templates["default"] = _text(path)
        elif file.endswith(".jinja"):
            templates[path.stem] = _text(path)
    return templates["default"] if [*templates] == ["default"] else templates or None


def _templates(in_config: Any, name: str) -> str | dict[str, str] | None:
    """The chat template of a `tokenizer_config.json`, or several by name."""
    if in_config is None or isinstance(in_config, str):
        return in_config
    named = in_config
    if isinstance(in_config, list) and all(
        isinstance(entry, dict) for entry in in_config
    ):
        named = {entry.get("name"): entry.get("template") for entry in in_config}
    if not isinstance(named, dict) or not all(
        isinstance(text, str) for entry in named.items() for text in entry
    ):
        raise DataError(
            f"data.tokenizer = {name!r}: `chat_template` in its {_CONFIG} is neither a"
            " text nor a list of "
            '{"name": ..., "template": ...}. Correct it, or write the template to a'
            f" {_TEMPLATE} beside it."
        )
    return named


def read_tokenizer_files(name: str) -> dict[str, str]:
    """The texts of a tokenizer's files, by the names (relative paths) that Hugging
    Face's libraries look for.

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
        folder = path.parent
        named_file = {_TOKENIZER: path}
    elif path.is_dir():
        folder = path
        named_file = {}
    elif _HUB_NAME.fullmatch(name) and not name.endswith(".json"):
        hub = optional("huggingface_hub", f"data.tokenizer = {name!r}")
        repository, _, revision = name.partition("@")
        try:  # from the Hub or its local cache
            patterns = [*_FILES, _FURTHER_TEMPLATES]
            options = {"revision": revision or None, "allow_patterns": patterns}
            folder = Path(hub.snapshot_download(repository, **options))
            named_file = {}
        except (
            OSError,
            ValueError,
        ) as error:  # those of the client are one or the other
            raise DataError(
                f"data.tokenizer = {name!r} is not a local folder or file, and could"
                " not be fetched from the Hugging Face Hub. Check the name and the"
                " network, log in with `hf auth login` for a gated one, or give a local"
                f" folder. The Hub's client says: {' '.join(str(error).split())}"
            ) from error
    else:
        raise DataError(
            f"data.tokenizer = {name!r} is neither `byte`, nor a folder or"
            " tokenizer.json that exists, nor a name on the Hugging Face Hub"
            " (owner/name)."
        )
    further = sorted(folder.glob(_FURTHER_TEMPLATES))
    names = [*_FILES, *(path.relative_to(folder).as_posix() for path in further)]
    files = {file: folder / file for file in names if (folder / file).is_file()}
    files |= named_file
    if _TOKENIZER not in files:
        raise DataError(
            f"data.tokenizer = {name!r} has no {_TOKENIZER}. Convert older kinds of"
            " tokenizers with transformers,"
            " AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), and name"
            " that folder."
        )
    return files


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
