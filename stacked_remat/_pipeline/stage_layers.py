"""The layers of one stage as a fold, and what goes from stage to stage.

`StageLayers` makes of the fold that the loss calls one of a stage's rows of the stack,
and of the arrays that stages send each other (`Passed`) what that takes and returns.
All stages trace one program, so all have as many rows. Where the last stages have fewer
layers, the carry says how many run (`CountedCarry`); the loops read no other rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from jax import lax

from .._fused.folds import FollowedFold, leaves_or_none
from .._scan.layer_axis import Split, part_of_layers, split_tree
from .._scan.marks import is_array
from .._scan.until import CountedCarry
from .._scan.visitor import SweepResult
from .._stacked import Stacked
from .._static import PyTree, with_leaves
from .._sweep.trace import weak_as


class Passed(NamedTuple):
    """What a stage sends to the next. Cotangents of it, which are sent back, are of
    floating-point arrays alone.
    """

    carry: list[Any]
    # The outputs of the rows of all stages, with zeros for those of later stages; []
    # for a fold
    outputs: list[Any]


class Arguments(NamedTuple):
    """The further arguments of a stage's layers, as a fold takes them."""

    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class StageLayers:
    """The layers of one stage."""

    # The fold of all layers, as the loss calls it
    fold: FollowedFold
    # The axis of all layers
    Layers: Axis
    # The rows of this stage
    stack: Stacked
    # The number of this stage, and how many there are
    stage: Any
    stages: int

    @property
    def rows(self) -> int:
        """How many layers a stage may have."""
        return self.stack.Layers.size

    @property
    def count(self) -> Any:
        """How many layers this stage has."""
        if self._is_even:
            return self.rows
        return jnp.clip(self.Layers.size - self._first, 0, self.rows)

    @property
    def _is_even(self) -> bool:
        return self.rows * self.stages == self.Layers.size

    @property
    def _first(self) -> Any:
        """The row of the first layer of this stage, of those of all stages."""
        return self.stage * self.rows

    @property
    def _is_scan(self) -> bool:
        return self.fold.verb == "scan"

    # --- The fold

    def operands(self, arrays: Sequence[Any]) -> tuple[list[Any], Arguments]:
        """The leaves of the first carry, and the arguments of these layers, from the
        arrays of `(init, args, kwargs)` of the fold of all layers.
        """
        _, *types = self.fold.in_avals
        _, *static = self.fold.static.value
        init, args, kwargs = eqx.combine(with_leaves(types, arrays), static)
        # None in the block's place: paths into arguments count it
        arguments = (None, *args), kwargs
        (_, *args), kwargs = part_of_layers(
            arguments, self.Layers, self._first, self.rows, self.stack._caller
        )
        leaves = []
        for leaf, type_ in zip(arrays_of(init), self._carry_types, strict=True):
            leaves.append(strong(leaf, type_.dtype))
        return leaves, Arguments(tuple(args), kwargs)

    def applied(self, passed: Passed, arguments: Arguments) -> Passed:
        """What goes on after these layers; nothing is kept."""
        return self.after(passed, self._called("", passed, arguments))

    def vjp(self, passed: Passed, arguments: Arguments) -> tuple[PyTree, Any]:
        """The result of these layers, and their reverse sweep."""
        return self._called("_vjp", passed, arguments)

    def _called(self, suffix: str, passed: Passed, arguments: Arguments) -> Any:
        carry = self._carry(passed)
        if not self._is_even:
            carry = CountedCarry(self.count, carry)
        return self.fold.call(suffix, self.stack, carry, *arguments)

    def split(self, arguments: Arguments) -> Split:
        """The layers and their arguments, split over the rows."""
        args, kwargs = arguments
        tree = (self.stack._stored, *args), kwargs
        return split_tree(tree, self.stack.Layers, self.stack._caller)

    # --- Its results

    def after(self, passed: Passed, result: PyTree) -> Passed:
        """What goes on after these layers, from their result."""
        outputs: list[Any] = []
        carry = result
        if self._is_scan:
            carry, of_layers = result
            for stack, rows in zip(passed.outputs, arrays_of(of_layers), strict=True):
                outputs.append(
                    lax.dynamic_update_slice_in_dim(stack, rows, self._first, 0)
                )
        return Passed([*map(strong, arrays_of(_of_user(carry)))], outputs)

    def outputs_of_layers(self, passed: Passed) -> list[Any]:
        """The outputs of all layers, after those of the last stage."""
        return [rows[: self.Layers.size] for rows in passed.outputs]

    def cotangent(self, result: PyTree, cotangents: Passed) -> PyTree:
        """The cotangent of the result, from that of what goes on."""
        leaves = [*cotangents.carry]
        for stack in cotangents.outputs:
            leaves.append(lax.dynamic_slice_in_dim(stack, self._first, self.rows))
        return with_leaves(eqx.filter(result, eqx.is_inexact_array), leaves)

    def carry_cotangents(self, swept: SweepResult, passed: Passed) -> list[Any]:
        """For each array of the carry that was sent its cotangent, or zeros."""
        return cotangents_of(_of_user(swept.carry), self._carry(passed))

    # --- The carry

    @property
    def _carry_types(self) -> list[Any]:
        """Of the arrays of the carry, as layers return it. A number that is the first
        carry takes the type that it meets there.
        """
        result = self.fold.out_aval
        return jax.tree.leaves(result[0] if self._is_scan else result)

    @property
    def passed_types(self) -> Passed:
        """The types of what is sent."""
        outputs = []
        if self._is_scan:
            for type_ in jax.tree.leaves(self.fold.out_aval[1]):
                shape = self.rows * self.stages, *type_.shape[1:]
                outputs.append(type_.update(shape=shape))
        return Passed(self._carry_types, outputs)

    def _carry(self, passed: Passed) -> PyTree:
        """The carry with its arrays; those that are weakly typed are so in layers."""
        _, init, _, _ = self.fold.in_avals
        _, static, _, _ = self.fold.static.value
        leaves = [*map(weak_as, passed.carry, self._carry_types)]
        return eqx.combine(with_leaves(init, leaves), static)


def _of_user(carry: PyTree) -> PyTree:
    """A carry, or its cotangent, without the number of layers that are left."""
    return carry.carry if isinstance(carry, CountedCarry) else carry


def arrays_of(tree: PyTree) -> list[Any]:
    """The arrays among the leaves of a tree."""
    return [*filter(is_array, jax.tree.leaves(tree))]


def cotangents_of(cotangent: PyTree, like: PyTree) -> list[Any]:
    """For each array of a tree its cotangent; zeros where there is none."""
    leaves = []
    pairs = zip(leaves_or_none(like), leaves_or_none(cotangent), strict=True)
    for array, leaf in pairs:
        if is_array(array):
            leaves.append(jnp.zeros_like(array) if leaf is None else leaf)
    return leaves


def strong(leaf: Any, dtype: Any = None) -> Any:
    """An array without a weak type, as branches have to return the same types; and of
    another dtype.
    """
    dtype = leaf.dtype if dtype is None else dtype
    is_other = jax.typeof(leaf).weak_type or leaf.dtype != dtype
    return lax.convert_element_type(leaf, dtype) if is_other else leaf
