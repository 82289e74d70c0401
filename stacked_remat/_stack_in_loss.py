"""What a loss function is given in the place of a stack whose folds are followed."""

import abc
from typing import Any, ClassVar

import equinox as eqx
from haliax import Axis

from ._block_foldable import BlockFoldable
from ._policy import ScanCheckpointPolicy


class StackInLoss(eqx.Module):
    """Can be folded and scanned, and says why it has nothing else.

    Attributes:
        refusal: the error of any other attribute: a format of the stack's name and the attribute's.
    """

    _stack: BlockFoldable
    _name: str = eqx.field(static=True)

    refusal: ClassVar[str]

    @property
    def Block(self) -> Axis:
        """The axis of the layers."""
        return self._stack.Block

    Layers = Block

    @property
    def remat(self) -> ScanCheckpointPolicy:
        """The stack's policy."""
        return self._stack.remat

    def __len__(self) -> int:
        return len(self._stack)

    def fold(self, init: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As `Stacked.fold`."""
        return self._apply("fold", init, args, *_options(kwargs))

    def scan(self, init: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As `Stacked.scan`."""
        return self._apply("scan", init, args, *_options(kwargs))

    @abc.abstractmethod
    def _apply(
        self, verb: str, init: Any, args: tuple[Any, ...], options: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        """A call of `fold` or `scan`, its `remat`, `unroll` and `reverse` apart from its other arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self.refusal.format(self._name, name))


def _options(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    options = {name: kwargs[name] for name in ("remat", "unroll", "reverse") if name in kwargs}
    return options, {name: value for name, value in kwargs.items() if name not in options}
