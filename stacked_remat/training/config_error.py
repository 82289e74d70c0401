"""The error for a config that can't be used."""


class ConfigError(ValueError):
    """A config that can't be used; the message names the key, where it came from, and the fix."""
