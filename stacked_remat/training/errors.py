"""The errors of configs and data, whose messages hold no passwords and tokens, and of
checkpoints.
"""

import re
from typing import Any

_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"<>]*")
# A password may contain a `/` that should have been written %2F: then no port follows
# the colon.
_USER = re.compile(r"(?<=://)([^/?#]*@|[^/?#@:]*:(?!\d+([/?#]|$))[^?#]*@)")
_VALUE = re.compile(r"(?<=[?&;#])([^=&;#]*=)?[^=&;#]+")
_URL_BEGIN = re.compile(r"[A-Za-z][\w+.-]*://")
_WEB = re.compile(r"https?://", re.IGNORECASE)


class _WithoutCredentials(ValueError):
    def __init__(self, message: str):
        super().__init__(without_credentials(message))


class ConfigError(_WithoutCredentials):
    """A config that can't be used; the message names the key, where it was written, and
    the fix.
    """


class CheckpointMismatchError(ValueError):
    """A checkpoint has the arrays of another model or optimizer; the message names
    them.
    """


class CheckpointDamagedError(ValueError):
    """A checkpoint is damaged or incomplete; the message names it."""


class DataError(_WithoutCredentials):
    """Data that can't be used; the message names the file, the line or row if there is
    one, and the fix.
    """


def without_credentials(text: str) -> str:
    """The text with `***` for users, passwords and all values of queries in its
    URLs.
    """
    if _URL_BEGIN.match(text):  # all of the text is a URL, which may contain spaces
        return _redacted(text)
    return _URL.sub(lambda found: _redacted(found.group()), text)


def all_without_credentials(tree: Any) -> Any:
    """The same for all strings in nested dicts, lists and tuples, except for keys."""
    if isinstance(tree, str):
        return without_credentials(tree)
    if isinstance(tree, dict):
        return {key: all_without_credentials(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(all_without_credentials(value) for value in tree)
    return tree


def _redacted(url: str) -> str:
    place, mark, query = _USER.sub("***@", url).partition("?")
    if mark and (
        _WEB.search(place) or "=" in query
    ):  # in other URLs a `?` alone is part of a glob
        return place + _VALUE.sub(
            lambda found: f"{found.group(1) or ''}***", mark + query
        )
    return place + mark + query
