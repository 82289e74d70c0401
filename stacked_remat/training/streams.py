"""What the loop asks of its data."""

from typing import Any, Protocol

from .batches import TokenBatch


class TokenStream(Protocol):
    """Batches to train on, without end."""

    def next(self) -> TokenBatch:
        """The batch at the stream's position; moves on by one."""
        ...

    def get_state(self) -> dict[str, Any]:
        """The position, small and fit for JSON."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned."""
        ...


class HeldOutSet(Protocol):
    """Batches that are never trained on, always the same ones."""

    def __len__(self) -> int:
        """How many."""
        ...

    def batch(self, index: int) -> TokenBatch:
        """One of them."""
        ...
