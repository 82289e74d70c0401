"""URLs without the passwords and tokens in them, for messages, logs and files."""

import re
from typing import Any

_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"<>]*")
# A password may hold a `/` that should have been written %2F: what follows the colon is then no port.
_USER = re.compile(r"(?<=://)([^/?#]*@|[^/?#@:]*:(?!\d+([/?#]|$))[^?#]*@)")
_VALUE = re.compile(r"(?<=[?&;#])([^=&;#]*=)?[^=&;#]+")
_URL_BEGIN = re.compile(r"[A-Za-z][\w+.-]*://")
_WEB = re.compile(r"https?://", re.IGNORECASE)


def without_credentials(text: str) -> str:
    """The text with `***` in place of users, passwords and the values of queries in its URLs.

    What stands in a query is a secret or is not, and nothing says which; so all of it is left out.
    """
    if _URL_BEGIN.match(text):  # nothing but a URL, with whatever letters in it
        return _redacted(text)
    return _URL.sub(lambda found: _redacted(found.group()), text)


def all_without_credentials(tree: Any) -> Any:
    """The same for all strings in nested dicts, lists and tuples, keys aside."""
    if isinstance(tree, str):
        return without_credentials(tree)
    if isinstance(tree, dict):
        return {key: all_without_credentials(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(all_without_credentials(value) for value in tree)
    return tree


def _redacted(url: str) -> str:
    url = _USER.sub("***@", url)
    if _WEB.search(url) or "=" in url.partition("?")[2]:  # in other URLs a `?` alone is part of a glob
        place, mark, query = url.partition("?")
        fragment = "" if mark else place.partition("#")[2]
        if mark:
            url = place + _VALUE.sub(lambda found: f"{found.group(1) or ''}***", mark + query)
        elif "=" in fragment:
            url = place.partition("#")[0] + "#***"
    return url
