"""The error for data that can't be used."""

from ..credentials import without_credentials


class DataError(ValueError):
    """Data that can't be used; the message names the file, the line or row if there is one, and the fix.

    Credentials in URLs of the message are replaced.
    """

    def __init__(self, message: str):
        super().__init__(without_credentials(message))
