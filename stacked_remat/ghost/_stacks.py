"""Stacks in a loss function whose gradient dot products are taken: each call is traced as one equation."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import eval_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._activity import programs_in
from .._block_seq import BlockSeq
from .._noted import Notes, noting
from .._scan.marks import changed, is_named, raw_array
from .._stacked import Stacked
from .._stacked_pattern import StackedPattern
from ._traced import arrays_of, is_traced, shapes_of, trace, with_arrays


def is_stack(node: Any) -> bool:
    return isinstance(node, Stacked | BlockSeq)


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
        verb: `fold_via` or `scan_via`.
        options: `remat`, `unroll` and `reverse`, where the call gives them.
        given: `(stack, init, args, kwargs)`, each array replaced by its type. The arrays are the first
            operands of the equation.
        layers: the traced layer by its place among layers that are not alike: its kind, or its number. What
            they close over are the next operands, layer by layer.
        types: of the results.
    """

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

    def operands_of(self, place: Any) -> list[int | None]:
        """For each constant and each input of the layer at a place, the operand that it is or is a part of.

        None for the layer's own arrays, and where it can't be told.
        """
        layer, (of_stack, of_init, of_args) = self.layers[place], self.sizes
        first, left = of_stack + of_init, len(layer.jaxpr.in_avals) - layer.of_block - layer.of_carry
        before = list(self.layers).index(place)
        start = first + of_args + sum(len(one.jaxpr.consts) for one in [*self.layers.values()][:before])
        return [
            *range(start, start + len(layer.jaxpr.consts)),
            *[None] * layer.of_block,
            *(range(of_stack, first) if layer.of_carry == of_init else [None] * layer.of_carry),
            *(range(first, first + of_args) if left == of_args else [None] * left),
        ]

    def evaluate(
        self,
        operands: Sequence[Any],
        layer: Callable[..., Any],
        direction: dict[str, Any],
        probes: dict[str, Any],
    ) -> list[Any]:
        """The results, of a function of each layer, a `PlacedBlock` with its directions and probes."""
        stack, init, args, kwargs = with_arrays(self.given, operands)
        with noting(Notes()):
            run = getattr(placed(stack, direction, probes), self.verb)(layer, **self.options)
            return arrays_of(run(init, *args, **kwargs))

    def plain(self, *operands: Any) -> list[Any]:
        """The results, without scores."""
        captured = self.captured(operands)

        def layer(one: PlacedBlock, carry: Any, /, *args: Any, **kwargs: Any) -> Any:
            traced, inputs = self.layers[one.place], arrays_of((one.block, carry, args, kwargs))
            return traced.rebuild(eval_jaxpr(traced.jaxpr.jaxpr, captured[one.place], *inputs))

        return self.evaluate(operands, layer, {}, {})


class PlacedBlock(eqx.Module):
    """A layer, with the directions and probes of its arrays by their paths.

    `place` is its place among layers that are not alike. Scores need a layer's own arrays, so all are sliced.
    """

    slices_its_own_layers = True

    block: Any
    direction: dict[str, Any]
    probes: dict[str, Any]
    place: str | int | None = eqx.field(static=True, default=None)


def prefix_of(stack: Any, place: str | int | None) -> str:
    """The path in a stack of its layer at a place."""
    if isinstance(stack, Stacked):
        return ".stacked"
    return f".stacks[{place!r}].stacked" if isinstance(stack, StackedPattern) else f".blocks[{place}]"


def placed(stack: Any, direction: dict[str, Any], probes: dict[str, Any]) -> Any:
    """A stack of `PlacedBlock`s, from directions and probes by the path in the stack."""

    def block(own: Any, place: str | int | None = None) -> PlacedBlock:
        prefix = prefix_of(stack, place)

        def within(entries: dict[str, Any]) -> dict[str, Any]:
            return {path.removeprefix(prefix): x for path, x in entries.items() if path.startswith(prefix)}

        return PlacedBlock(own, within(direction), within(probes), place)

    if isinstance(stack, Stacked):
        return Stacked(block(stack.stacked), stack.Layers, stack.remat)
    if isinstance(stack, StackedPattern):
        stacks = {kind: changed(own, stacked=block(own.stacked, kind)) for kind, own in stack.stacks.items()}
        return changed(stack, stacks=stacks)
    return changed(stack, blocks=[block(own, i) for i, own in enumerate(stack.blocks)])


def call_in_one_equation(
    stack: Any, verb: str, fn: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """`stack.fold_via(fn, **options)` or `scan_via`, whose calls are traced as one equation."""

    def run(init: Any, /, *args: Any, **kwargs: Any) -> Any:
        given, layers = (stack, init, args, kwargs), {}

        def apply(stack: Any, init: Any, args: Any, kwargs: Any) -> Any:
            with noting(Notes()):
                layer = _traced_layer(fn, layers)
                return getattr(placed(stack, {}, {}), verb)(layer, **options)(init, *args, **kwargs)

        closed, arrays, rebuild = trace(apply, *given)
        captured = [const for layer in layers.values() for const in layer.jaxpr.consts]
        call = StackCall(verb, options, shapes_of(given), layers, tuple(closed.out_avals))
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


def evaluates_stack(equation: Any) -> bool:
    """Whether a loop, a branch or the like calls a stack."""
    return any(
        inner.primitive is stack_p or evaluates_stack(inner)
        for jaxpr in programs_in(equation)
        for inner in jaxpr.eqns
    )


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], *, call: StackCall) -> Any:
    moving = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*arrays: Any) -> list[Any]:
        given = dict(zip(moving, arrays, strict=True))
        return call.plain(*(given.get(at, primal) for at, primal in enumerate(primals)))

    found, along = jax.jvp(of_moving, [primals[at] for at in moving], [tangents[at] for at in moving])
    is_moving = [jnp.issubdtype(one.dtype, jnp.inexact) for one in found]
    pairs = zip(found, along, is_moving, strict=True)
    return found, [
        new if is_one else ad.Zero(jax.typeof(one).to_tangent_aval()) for one, new, is_one in pairs
    ]


def _batched(operands: Sequence[Any], dims: Sequence[Any], *, call: StackCall) -> Any:
    found = jax.vmap(call.plain, in_axes=tuple(dims))(*operands)
    return found, [0] * len(found)


# A call that is not scored, or within what is not, is an ordinary one.
stack_p = Primitive("stacked_remat_ghost_stack")
stack_p.multiple_results = True
stack_p.def_abstract_eval(lambda *_, call: list(call.types))
stack_p.def_impl(lambda *operands, call: call.plain(*operands))
ad.primitive_jvps[stack_p] = _derivative
batching.primitive_batchers[stack_p] = _batched
mlir.register_lowering(
    stack_p, mlir.lower_fun(lambda *operands, call: call.plain(*operands), multiple_results=True)
)
