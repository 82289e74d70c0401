"""What the loop asks of its data, and today's batches in that form."""

from typing import Any, Protocol, final

from .batches import PackedTokens, TokenBatch


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


@final
class PackedStream:
    """The batches of `PackedTokens` as a stream; its position is the index of the next batch."""

    def __init__(self, packed: PackedTokens):
        self._packed = packed
        self._next = 0

    def next(self) -> TokenBatch:
        """The batch at the stream's position; moves on by one."""
        self._next += 1
        return self._packed.batch(self._next - 1)

    def get_state(self) -> dict[str, Any]:
        """The index of the next batch."""
        return {"next": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned."""
        self._next = int(state["next"])


@final
class PackedHeldOut:
    """The batches of `PackedTokens` that its sequences fill, each sequence once."""

    def __init__(self, packed: PackedTokens):
        self._packed = packed

    def __len__(self) -> int:
        """How many."""
        return len(self._packed) // self._packed.batch_size

    def batch(self, index: int) -> TokenBatch:
        """One of them."""
        return self._packed.batch(index)
