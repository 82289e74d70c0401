"""Values of a program that is evaluated with deposits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ._units import Flow, Numbers, Rows
from ._weights import Node, leaves_of


class UnsupportedLeafError(ValueError):
    """A weight is used in a way for which its scores can't be found leaf by leaf."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of the program.

    Attributes:
        array: the value itself.
        rows: which of its dimensions hold examples.
        node: how it depends on weights, where it depends on them and not on data.
        depends: whether it depends on data, with or without a dimension of examples.
        numbers: which of its rows it numbers; see `_numbers`.
        lost: the operation after which its rows are not known, for errors; empty where they are.
    """

    array: Any
    rows: Rows = ()
    node: Node | None = None
    depends: bool = False
    numbers: Numbers = ()
    lost: str = ""

    @property
    def flow(self) -> Flow:
        """What is known of it."""
        return Flow(self.rows, numbers=self.numbers)

    @property
    def operand(self) -> Any:
        """As an operand of a derivative."""
        return self.array if self.node is None else self.node


def constant(array: Any) -> Value:
    """A value that is the same for all examples."""
    return Value(array, plain_rows(array))


def plain_rows(array: Any) -> Rows:
    """The rows of an array without examples."""
    return tuple(((size, None),) for size in jnp.shape(array))


def paths_of(operands: Sequence[Value]) -> str:
    """The paths of the weights that values depend on, for errors."""
    nodes = [value.node for value in operands if value.node is not None]
    return ", ".join(leaf.path for leaf in leaves_of(nodes))


def lost_in(values: Sequence[Value]) -> str:
    """After which operations rows are not known, for errors; empty where they are."""
    found = sorted({value.lost for value in values} - {""})
    return f", since they are lost in {', '.join(found)}" if found else ""
