"""Checks of values that several configs have in common; they raise a `ValueError` that
names the key.
"""

import datetime
import typing
from typing import Any

from .errors import without_credentials


def check_at_least(lowest: int, section: str, config: Any, *names: str) -> None:
    """Refuses fields of a config below `lowest`; None is not checked."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < lowest:
            raise ValueError(
                f"{section}.{name} must be at least {lowest}, got {value}."
            )


def check_positive(section: str, config: Any, *names: str) -> None:
    """Refuses fields of a config that are not above 0; None is not checked."""
    for name in names:
        if (value := getattr(config, name)) is not None and value <= 0:
            raise ValueError(f"{section}.{name} must be positive, got {value}.")


def check_choices(section: str, config: Any) -> None:
    """Refuses values that the `Literal` annotations of a dataclass do not list."""
    for name, hint in typing.get_type_hints(type(config)).items():
        valid = (
            typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        )
        if valid and getattr(config, name) not in valid:
            raise ValueError(
                f"{section}.{name} must be one of {', '.join(valid)}, got"
                f" {getattr(config, name)!r}."
            )


def check_date(key: str, date: str | None) -> None:
    """Refuses text that is no date of the calendar; None is not checked."""
    try:
        datetime.date.fromisoformat(date or "2000-01-01")
    except ValueError as error:
        raise ValueError(
            f"{key} must be a date such as 2025-06-30, got {date!r}: {error}."
        ) from error


def check_folder(key: str, folder: str) -> None:
    """Refuses text that can't be the path of a local folder."""
    if not folder.strip() or "\0" in folder:
        raise ValueError(f"{key} must be the path of a folder, got {folder!r}.")
    if "://" in folder:
        raise ValueError(
            f"{key} = {without_credentials(folder)!r} is a URL; it must be a folder of"
            " this machine, or one that is mounted there. Write its path."
        )
