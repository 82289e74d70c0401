"""The error for data that can't be used."""


class DataError(ValueError):
    """Data that can't be used; the message names the file, the line or row if there is one, and the fix."""
