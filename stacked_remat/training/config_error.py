"""The error for a config that can't be used."""

from .credentials import without_credentials


class ConfigError(ValueError):
    """A config that can't be used; the message names the key, where it was written, and the fix.

    Passwords and tokens in URLs are removed from the message.
    """

    def __init__(self, message: str):
        super().__init__(without_credentials(message))
