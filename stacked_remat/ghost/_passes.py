"""The passes that find gradients, scores and norms.

In one pass over all examples, weights have scores where they meet data, or with norms
in the backward pass of their layers. What has none there follows in a pass outside of
the loops over layers, example by example.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from haliax import Axis
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_batching import custom_vmap
from jax.extend.core import Var

from .._activity import active_variables, has_tangent, is_in
from .._noted import Notes, noting
from .._paths import dotted
from .._scan.marks import is_named, raw_array
from .._stacked import Stacked
from .._sweep.gradient import merge, pick
from ._examples import Examples
from ._interpret import Interpreter, is_loop, looped, sliced_places
from ._losses import Task, leaves_with_paths
from ._traced import Traced, arrays_of, equations_of, has_small_range, trace
from ._weights import SAME, Along, Value, of_each_example


@dataclasses.dataclass(frozen=True)
class ProbedLeaf:
    """The path of an array as users see it; in a `Stacked` the axis of its layers, and
    their dimension.
    """

    shown: str
    layers: tuple[Axis, ...]
    dimension: int | None


def probed_leaves(model: Any) -> dict[str, ProbedLeaf]:
    """A model's arrays, by their paths as `jax.tree_util.keystr` writes them."""
    found = {}

    def is_leaf(node: Any) -> bool:
        return is_named(node) or isinstance(node, Stacked)

    for at, node in jtu.tree_leaves_with_path(model, is_leaf=is_leaf):
        layers = (node.Layers,) if isinstance(node, Stacked) else ()
        for keys, leaf in jtu.tree_leaves_with_path(node, is_leaf=is_named):
            path = (*at, *keys)
            found[jtu.keystr(path)] = ProbedLeaf(
                dotted(model, path), layers, _dimension(leaf, *layers)
            )
    return found


def _dimension(leaf: Any, Layers: Axis | None = None) -> int | None:
    if Layers is None:
        return None
    return [axis.name for axis in leaf.axes].index(Layers.name) if is_named(leaf) else 0


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """What is scored: arrays of the model and the direction by their paths, and the
    axis of the examples.
    """

    task: Task
    leaves: dict[str, ProbedLeaf]
    direction: dict[str, Any]
    Batch: Axis


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The loss of one example, without calls but those noted, and the weights that have
    a pass of their own.

    With `by_example`, each layer takes one example after the other. Beside the loops
    are the types of their operands that depend on weights outside, None where one of
    these is the same for all examples.
    """

    scoring: Scoring
    examples: Examples
    by_example: bool
    notes: Notes
    one: Traced
    loops: list[tuple[Any, dict[int, Any] | None]]
    outside: list[str]

    @staticmethod
    def of(scoring: Scoring, *, norms: bool) -> "Program":
        task = scoring.task
        notes = Notes()
        examples = Examples.of(task.batch, scoring.Batch)
        with examples.alone(), noting(notes):
            one = trace(
                task.of_example, task.model, eqx.filter_eval_shape(examples.take, 0)
            )
        closed = one.closed
        flat = jax.make_jaxpr(
            lambda *arrays: Interpreter(notes).arrays(closed, [*map(Value, arrays)])
        )
        one = dataclasses.replace(one, closed=flat(*closed.in_avals))
        jaxpr = one.closed.jaxpr
        # Products with a direction may be too small for float16.
        by_example = norms or has_small_range(equations_of(jaxpr))
        # Of the model come first: `trace` flattens the arguments in their order.
        paths = [path for path, _ in leaves_with_paths(task.model)]
        inputs = dict(zip(paths, jaxpr.invars, strict=False))
        stacks = {
            inputs[path]: path
            for path in scoring.direction
            if scoring.leaves[path].dimension == 0
        }
        of_data = active_variables(jaxpr, jaxpr.invars[len(paths) :], lambda _: True)
        inner = _of_loops(jaxpr, stacks, of_data)
        # Weights that a loop slices are scored within it. Others are scored where they
        # meet data, or, where that isn't told by layer or by example, in a pass of
        # their own.
        others = [path for path in scoring.direction if path not in inner]
        outside = [path for path in others if by_example or scoring.leaves[path].layers]
        # The second pass doesn't repeat the loops: it takes their results, and the
        # cotangents of those operands that depend on weights outside, from the first
        # pass.
        of_outside = active_variables(jaxpr, [inputs[path] for path in outside])
        loops = []
        for equation in filter(is_loop, jaxpr.eqns if by_example or outside else ()):
            atoms = {
                at: atom
                for at, atom in enumerate(equation.invars)
                if is_in(atom, of_outside)
            }
            types = {at: atom.aval for at, atom in atoms.items()}
            loops.append(
                (
                    equation,
                    types
                    if all(is_in(atom, of_data) for atom in atoms.values())
                    else None,
                )
            )
        return Program(scoring, examples, by_example, notes, one, loops, outside)

    def number(self, equation: Any) -> int | None:
        return next(
            (number for number, loop in enumerate(self.loops) if loop[0] is equation),
            None,
        )

    def values(self, model: Any, probes: dict[str, Any], example: Any) -> list[Value]:
        """The inputs, with the directions and probes of the weights that have probes.

        What depends on data is differentiated; by example only what depends on other
        trained weights.
        """
        leaves = self.scoring.leaves
        direction = self.scoring.direction
        by_example = self.by_example
        trained = (
            {path for path, _ in leaves_with_paths(self.scoring.task.params)}
            if by_example
            else ()
        )
        alongs = {
            path: (
                Along(
                    leaves[path].shown or "the model", raw_array(direction[path]), probe
                ),
            )
            for path, probe in probes.items()
        }
        found = [
            Value(
                raw_array(leaf),
                alongs.get(path, ()),
                path in trained and path not in alongs,
            )
            for path, leaf in leaves_with_paths(model)
        ]
        return found + [
            Value(array, depends=not by_example) for array in arrays_of(example)
        ]


def _of_loops(jaxpr: Any, weights: dict[Any, str], of_data: set[Any]) -> set[str]:
    """The paths of the weights that are used once, maybe cast: by a loop, of which each
    turn has a slice.
    """
    read = [atom for equation in jaxpr.eqns for atom in equation.invars] + jaxpr.outvars
    uses = Counter(atom for atom in read if isinstance(atom, Var))
    found = set()
    alone = {var: path for var, path in weights.items() if uses[var] == 1}
    for equation in jaxpr.eqns:
        operands = equation.invars
        if equation.primitive.name in SAME and is_in(operands[0], {*alone}):
            alone |= {
                var: alone[operands[0]] for var in equation.outvars if uses[var] == 1
            }
        if is_loop(equation) and any(is_in(atom, of_data) for atom in operands):
            found |= {
                alone[operands[at]]
                for at in sliced_places(equation)
                if is_in(operands[at], {*alone})
            }
    return found


def scored(scoring: Scoring, *, norms: bool) -> tuple[Any, Any, dict[str, Any]]:
    """The loss and what comes with it, its gradients, and numbers of an example's part
    of it, by path.

    `[layers, batch, number]` or `[batch, number]`: the score, and with `norms` the
    square of the norm.
    """
    program = Program.of(scoring, norms=norms)
    with program.examples.alone(), noting(Notes()):
        found, gradients, numbers, kept = _in_one_pass(program)
        numbers |= _outside(program, *kept) if program.outside else {}
    return found, gradients, {path: numbers[path] for path in scoring.direction}


def _in_one_pass(program: Program) -> tuple[Any, Any, dict[str, Any], Any]:
    """What `scored` returns, of what is not outside, and of loops the results and the
    cotangents of data.
    """
    scoring = program.scoring
    task = program.scoring.task
    objective = program.scoring.task.objective
    more = (2,) if program.by_example else ()
    size = scoring.Batch.size
    inside = [path for path in scoring.direction if path not in program.outside]
    layers = {
        path: [axis.size for axis in scoring.leaves[path].layers] for path in inside
    }
    probes = {
        path: jnp.zeros((size, *sizes, *more), jnp.float32)
        for path, sizes in layers.items()
    }
    # Zeros that are added to these operands have their cotangents for each example.
    types = [types or {} for _, types in program.loops]
    zeros = jax.tree.map(
        lambda type_: jnp.zeros((size, *type_.shape), type_.dtype), types
    )

    def loss(params: Any, *each: Any) -> tuple[Any, Any]:
        model = eqx.combine(params, task.static)

        def run(each: Any, example: Any) -> Any:
            (probes, zeros) = each
            results = {}

            def at_loop(equation: Any, operands: list[Value]) -> list[Any] | None:
                number = program.number(equation)
                if number is None:
                    return None
                for at, zero in zeros[number].items():
                    operands[at] = dataclasses.replace(
                        operands[at], array=operands[at].array + zero
                    )
                evaluate = _one_by_one if program.by_example else interpreter.arrays
                # Kept for the pass outside of the loops
                results[number] = looped(equation, operands, evaluate)
                return results[number]

            interpreter = Interpreter(program.notes, at_loop)
            return interpreter.arrays(
                program.one.closed, program.values(model, probes, example)
            ), results

        arrays, results = program.examples.map(run, each)
        joined = [*map(program.examples.joined, program.one.leaves, arrays)]
        value, aux = objective.reduced(program.one.rebuild(joined))
        return value, (aux, results)

    # The gradient with respect to the probes is what they are for: the scores.
    run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (value, (aux, results)), (gradients, numbers, cotangents) = run(
        task.params, probes, zeros
    )
    numbers = {
        path: jnp.moveaxis(own if program.by_example else own[..., None], 0, -2)
        for path, own in numbers.items()
    }
    return (value, aux), gradients, numbers, (results, cotangents)


def _outside(program: Program, *kept: Any) -> dict[str, Any]:
    """What `scored` returns of the weights outside, from the results and cotangents of
    the loops.
    """
    scoring = program.scoring
    task = program.scoring.task
    objective = program.scoring.task.objective
    outside = {
        path: leaf
        for path, leaf in leaves_with_paths(task.params)
        if path in program.outside
    }

    def of_example(number: Any) -> dict[str, Any]:
        results, cotangents = jax.tree.map(lambda array: array[number], kept)

        def loss(weights: dict[str, Any]) -> Any:
            through = []

            def at_loop(equation: Any, operands: list[Value]) -> list[Any] | None:
                at = program.number(equation)
                if at is None or program.loops[at][1] is None:
                    return None
                # To first order, what a loop makes of an operand is the product with
                # its cotangent, whose gradient is the part that goes through the loop.
                through.extend(
                    _dot(operands[place].array, own)
                    for place, own in cotangents[at].items()
                )
                return results[at]

            params = jtu.tree_map_with_path(
                lambda path, leaf: weights.get(jtu.keystr(path), leaf),
                task.params,
                is_leaf=is_named,
            )
            model = eqx.combine(params, task.static)
            values = program.values(model, {}, program.examples.take(number))
            arrays = Interpreter(program.notes, at_loop).arrays(
                program.one.closed, values
            )
            own = objective.of_examples(program.one.rebuild(arrays))[0]
            return (own / objective.scale(scoring.Batch.size)).astype(
                jnp.float32
            ) + sum(through)

        gradients = jax.grad(loss)(outside)
        return {
            path: _numbers(own, scoring.direction[path], scoring.leaves[path].dimension)
            for path, own in gradients.items()
        }

    # One after the other: a gradient of weights outside exists for one example at a
    # time.
    found = lax.map(of_example, jnp.arange(scoring.Batch.size))
    return {path: jnp.moveaxis(own, 0, -2) for path, own in found.items()}


def _one_by_one(program: Any, inputs: Sequence[Value]) -> list[Any]:
    """The results of a layer, whose backward pass takes the examples of `jax.vmap` one
    after the other.

    The cotangents of probes are numbers of an example's gradient.
    """
    alongs = [value.alongs[0] for value in inputs if value.alongs]
    jaxpr = getattr(program, "jaxpr", program)
    consts = getattr(program, "consts", ())
    # Integers and keys go past the rule: they have no cotangents that the backward pass
    # could be given.
    real = [*map(has_tangent, jaxpr.outvars)]
    pairs = zip(jaxpr.invars, inputs, strict=True)
    moved = [
        has_tangent(var) and (value.depends or bool(value.alongs))
        for var, value in pairs
    ]
    scored = [bool(value.alongs) for value in pick(inputs, moved)]

    def layer(given: list[Any], others: list[Any]) -> list[Any]:
        return eval_jaxpr(jaxpr, consts, *merge(others, given, moved))

    @jax.custom_vjp
    def run(
        given: list[Any], others: list[Any], directions: list[Any], probes: list[Any]
    ) -> list[Any]:
        found = layer(given, others)
        return merge(found, of_each_example(probes[0], pick(found, real)), real)

    def of_example(
        given: list[Any],
        others: list[Any],
        directions: list[Any],
        cotangents: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        _, pullback = jax.vjp(lambda given: pick(layer(given, others), real), given)
        (found,) = pullback(cotangents)
        return found, [*map(_numbers, pick(found, scored), directions)]

    def backward(kept: Any, cotangents: list[Any]) -> tuple[Any, None, None, Any]:
        # The cotangent of a probe is not a derivative here but the numbers themselves,
        # which leave the backward pass that way.
        found, numbers = _summed(of_example, *kept, pick(cotangents, real))
        return found, None, None, numbers

    run.defvjp(lambda *args: (run(*args), args[:3]), backward)
    arrays = [value.own for value in inputs]
    given = pick(arrays, moved)
    others = [None if is_ else x for x, is_ in zip(arrays, moved, strict=True)]
    if not alongs:
        return layer(given, others)
    return run(
        given,
        others,
        [along.direction for along in alongs],
        [along.probe for along in alongs],
    )


def _summed(fn: Callable, given: list[Any], *rest: Any) -> Any:
    """`fn(given, *rest)`: cotangents of `given`, and numbers; in `jax.vmap` of one
    example after the other.

    There the cotangents of what the examples share are sums over them.
    """
    leaves, tree = jax.tree.flatten((given, *rest))

    # `jax.vmap` would make the gradients of all examples at once.
    @custom_vmap
    def run(*leaves: Any) -> Any:
        return fn(*jax.tree.unflatten(tree, leaves))

    @run.def_vmap
    def every(size: int, is_mapped: Sequence[bool], *leaves: Any) -> Any:
        # What an example has for itself gets its own cotangent, and what examples
        # share, such as weights, the sum, which is added up as they come.
        own = [*is_mapped[: len(given)]]
        shared = [not is_ for is_ in own]

        def step(sums: list[Any], some: list[Any]) -> Any:
            found, numbers = run(*merge(leaves, some, is_mapped))
            sums = [
                old + new.astype(old.dtype)
                for old, new in zip(sums, pick(found, shared), strict=True)
            ]
            return sums, (pick(found, own), numbers)

        # Sums are in float32, so that a batch of many examples loses no small parts.
        like = pick(leaves[: len(given)], shared)
        zeros = [
            jnp.zeros(leaf.shape, np.promote_types(leaf.dtype, np.float32))
            for leaf in like
        ]
        sums, (found, numbers) = lax.scan(step, zeros, pick(leaves, is_mapped))
        sums = [
            total.astype(leaf.dtype) for total, leaf in zip(sums, like, strict=True)
        ]
        found = merge(merge(leaves[: len(given)], found, own), sums, shared)
        return (found, numbers), (own, [True] * len(numbers))

    return run(*leaves)


def _numbers(gradient: Any, direction: Any, layers: int | None = None) -> Any:
    """The dot product of a gradient with a direction, and with itself: `[2]`, or
    `[layers, 2]`.
    """
    return jnp.stack(
        [_dot(gradient, direction, layers), _dot(gradient, gradient, layers)], -1
    )


def _dot(array: Any, other: Any, layers: int | None = None) -> Any:
    """The sum of the products, of each layer where a dimension has layers."""
    first, second = (raw_array(one).astype(jnp.float32) for one in (array, other))
    return jnp.sum(first * second, tuple(n for n in range(first.ndim) if n != layers))
