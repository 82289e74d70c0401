"""The error for a config that can't be used."""

from .credentials import without_credentials


class ConfigError(ValueError):
    """A config that can't be used; the message names the key, where it came from, and the fix.

    What passwords and tokens are in its URLs is left out.
    """

    def __init__(self, message: str):
        super().__init__(without_credentials(message))
