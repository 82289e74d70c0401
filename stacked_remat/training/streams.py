"""Protocols of the data that the training loop reads."""

from typing import Any, Protocol

from .batches import TokenBatch


class TokenStream(Protocol):
    """An endless stream of batches to train on."""

    def next(self) -> TokenBatch:
        """The batch at the stream's position, which advances by one."""
        ...

    def get_state(self) -> dict[str, Any]:
        """The position, as a small JSON object."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Sets the position to one that `get_state` returned."""
        ...


class HeldOutSet(Protocol):
    """A fixed list of batches that are never trained on."""

    def __len__(self) -> int:
        """The number of batches."""
        ...

    def batch(self, index: int) -> TokenBatch:
        """The batch of this index."""
        ...
