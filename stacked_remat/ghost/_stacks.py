"""Stacks in a loss function whose gradient dot products are taken: each call is traced as one equation."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jax.core import eval_jaxpr
from jax.extend.core import Primitive, jaxprs_in_params
from jax.interpreters import ad, batching

from .._block_seq import BlockSeq
from .._noted import Notes, noting
from .._scan.marks import changed, is_named, raw_array
from .._stack_in_loss import StackInLoss
from .._stacked import Stacked
from .._stacked_methods import block_call
from .._stacked_pattern import StackedPattern
from ._traced import arrays_of, is_traced, shapes_of, trace
from ._values import UnsupportedLeafError


def is_stack(node: Any) -> bool:
    return isinstance(node, Stacked | BlockSeq)


def is_folded(node: Any) -> bool:
    """Whether a node is what a loss folds: a stack, or a pattern with several."""
    return is_stack(node) or isinstance(node, StackedPattern)


def leaves_with_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a tree, a named array as one, with their paths as `jax.tree_util.keystr` writes them."""
    for path, leaf in jtu.tree_leaves_with_path(tree, is_leaf=is_named):
        if is_traced(raw_array(leaf)):
            yield jtu.keystr(path), leaf


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLayer:
    """What one layer computes.

    Attributes:
        jaxpr: closed. Its constants are what the layer's function closes over.
        rebuild: from its results to what the layer returns.
        notes: the rules of noted calls in it.
        of_block: how many of its inputs are the layer's own arrays, which come first.
        of_carry: how many come next, and how many of its results, are the carry.
    """

    jaxpr: Any
    rebuild: Callable[[list[Any]], Any]
    notes: Notes
    of_block: int
    of_carry: int


@dataclasses.dataclass(frozen=True, eq=False)
class StackCall:
    """A call of `fold` or `scan`, or of one of these via another function.

    Attributes:
        name: of the stack, as users see it.
        paths: of its arrays that are scored.
        verb: `fold_via` or `scan_via`.
        options: `remat`, `unroll` and `reverse`, where the call gives them.
        given: `(stack, init, args, kwargs)`, each array replaced by its type. The arrays are the first
            operands of the equation.
        layers: the traced layer by its place among layers that are not alike: its kind, or its number. What
            they close over are the next operands, layer by layer.
        types: of the results.
    """

    name: str
    paths: str
    verb: str
    options: dict[str, Any]
    given: Any
    layers: dict[Any, TracedLayer]
    types: tuple[Any, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many of the operands are of the stack, of the carry, and of the other arguments."""
        stack, init, *others = self.given
        return len(arrays_of(stack)), len(arrays_of(init)), len(arrays_of(others))

    def captured(self, operands: Sequence[Any]) -> dict[Any, list[Any]]:
        """For each place the operands that its layer closes over."""
        left = iter(operands[sum(self.sizes) :])
        return {place: [next(left) for _ in layer.jaxpr.consts] for place, layer in self.layers.items()}


class PlacedBlock(eqx.Module):
    """A layer, with the directions and probes of its arrays by their paths.

    `place` is its place among layers that are not alike.
    """

    block: Any
    direction: dict[str, Any]
    probes: dict[str, Any]
    place: str | int | None = eqx.field(static=True, default=None)


def placed(stack: Any, direction: dict[str, Any], probes: dict[str, Any]) -> Any:
    """A stack of `PlacedBlock`s, from directions and probes by the path in the stack."""

    def block(prefix: str, own: Any, place: str | int | None = None) -> PlacedBlock:
        def within(entries: dict[str, Any]) -> dict[str, Any]:
            return {path.removeprefix(prefix): x for path, x in entries.items() if path.startswith(prefix)}

        return PlacedBlock(own, within(direction), within(probes), place)

    if isinstance(stack, Stacked):
        return Stacked(block(".stacked", stack.stacked), stack.Block, stack.remat)
    if isinstance(stack, StackedPattern):
        stacks = {
            kind: changed(own, stacked=block(f".stacks[{kind!r}].stacked", own.stacked, kind))
            for kind, own in stack.stacks.items()
        }
        return changed(stack, stacks=stacks)
    blocks = [block(f".blocks[{i}]", own, i) for i, own in enumerate(stack.blocks)]
    return changed(stack, blocks=blocks)


class FollowedStack(StackInLoss):
    """What a loss function is given in the place of a stack: it can be folded and scanned, no more.

    Its leaves are those of the stack, so that the model in the loss has those of the user's model.
    """

    _paths: str = eqx.field(static=True)

    refusal = (
        "In a loss whose gradient dot products are taken, {} has fold, scan, fold_via and scan_via, and no "
        "{!r}. Give its arrays no direction to use it otherwise."
    )

    def fold_via(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """As `Stacked.fold_via`."""
        return self._via("fold_via", fn, options)

    def scan_via(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """As `Stacked.scan_via`."""
        return self._via("scan_via", fn, options)

    def _apply(
        self, verb: str, init: Any, args: tuple[Any, ...], options: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        fn = block_call(next(iter(self._stack._kinds())))  # that of each block, which may be of another class
        return self._via(f"{verb}_via", fn, options)(init, *args, **kwargs)

    def _via(self, verb: str, fn: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        def run(init: Any, /, *args: Any, **kwargs: Any) -> Any:
            given, layers = (self._stack, init, args, kwargs), {}

            def apply(stack: Any, init: Any, args: Any, kwargs: Any) -> Any:
                layer = _traced_layer(fn, layers)
                return getattr(placed(stack, {}, {}), verb)(layer, **options)(init, *args, **kwargs)

            closed, arrays, rebuild = trace(apply, *given)
            captured = [const for layer in layers.values() for const in layer.jaxpr.consts]
            types = tuple(closed.out_avals)
            call = StackCall(self._name, self._paths, verb, options, shapes_of(given), layers, types)
            return rebuild(stack_p.bind(*arrays, *captured, call=call))

        return run


def _traced_layer(fn: Callable[..., Any], layers: dict[Any, TracedLayer]) -> Callable[..., Any]:
    """`fn` of a `PlacedBlock`, which also notes what it computes."""

    def apply(block: Any, carry: Any, args: Any, kwargs: Any) -> Any:
        return fn(block, carry, *args, **kwargs)

    @functools.wraps(fn)
    def layer(one: PlacedBlock, carry: Any, /, *args: Any, **kwargs: Any) -> Any:
        notes = Notes()
        with noting(notes):
            closed, inputs, rebuild = trace(apply, one.block, carry, args, kwargs)
        layers[one.place] = TracedLayer(
            closed, rebuild, notes, len(arrays_of(one.block)), len(arrays_of(carry))
        )
        return rebuild(eval_jaxpr(closed.jaxpr, closed.consts, *inputs))

    return layer


def contains_stack(equation: Any) -> bool:
    """Whether an equation is a call of a stack, or evaluates one."""
    return equation.primitive is stack_p or any(
        contains_stack(inner) for jaxpr in jaxprs_in_params(equation.params) for inner in jaxpr.eqns
    )


def _refuse_derivative(*_: Any, call: StackCall) -> Any:
    raise UnsupportedLeafError(
        f"{call.paths}: the loss takes a derivative (jax.grad, jax.jvp, ...) through "
        f"{call.name or 'a stack'}, of which scores can't be found layer by layer. Give these arrays no "
        "direction, compute the derivative before and pass it in the batch if it is a constant, or use "
        'granularity="block" or "total".'
    )


def _refuse_batching(*_: Any, call: StackCall) -> Any:
    raise UnsupportedLeafError(
        f"{call.paths} is folded under jax.vmap. Call the stack on the whole batch, with jax.vmap within its "
        'layers, so that the axis of examples is known there, or use granularity="block" or "total".'
    )


stack_p = Primitive("stacked_remat_ghost_stack")
stack_p.multiple_results = True
stack_p.def_abstract_eval(lambda *_, call: list(call.types))
ad.primitive_jvps[stack_p] = _refuse_derivative
batching.primitive_batchers[stack_p] = _refuse_batching
