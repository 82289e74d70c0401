"""Values inside layers: what keeping each takes, and what not keeping it costs.

The derivative of a layer reads some of the values that the layer computes, its
*residuals*. In the backward pass they are kept, or computed again from kept values and
from the layer's inputs. So a set of kept values has two figures: its bytes, and the
FLOPs of all operations that lie between it and the residuals. `ProgramValues.choices`
are the sets with the fewest bytes for numbers of FLOPs.

That is an integer program. Each operation `e` of FLOPs f(e) is computed again or not,
y(e), and each named value `v` of b(v) bytes is kept or not, k(v):

    minimize    sum of b(v) k(v)
    so that     sum of f(e) y(e) <= FLOPs
                k(v) + y(e) >= 1        for a residual v that e computes
                k(v) + y(e) >= y(g)     for an operation g that reads v from e

SciPy's solver (HiGHS) takes milliseconds for a hundred names. For layers of several
kinds there are the operations of each, times its layers, and a name is of values in any
of them.

A layer's operations are read off the trace of its pullback (`LayerPullback`) with a
name for each (`_places.py`), for the leaves that the program differentiates. They are
found in the traced program, in the sweeps over layers that it differentiates.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params

from .. import ScanCheckpointPolicy
from .._activity import CALLS, bytes_of, program_of
from .._hijax import primitive_of
from .._names import name_given_by, named
from .._place_names import is_place
from .._places import evaluate_named, without_dead_code
from .._remat import EVERYTHING
from .._sweep.gradient import LayerPullback, Perturbed
from .._sweep.kinds import Kind
from .._sweep.spec import SweepSpec
from ._flops import count_flops

# The number of FLOPs, between all and none of what is computed again, for which the
# kept values are found.
_LEVELS = 96
# How many equally good sets of names are tried: XLA may give one of them less memory.
_MOST_EQUALS = 3


@dataclass(frozen=True)
class Operation:
    """An operation of a layer's forward computation."""

    flops: int
    # The operations whose results it reads, by their numbers.
    reads: frozenset[int]
    # Whether its result depends on the carry, as those do that are kept, and whether it
    # reads the carry itself.
    is_data: bool
    reads_carry: bool
    # The name of its result and its bytes, if it gives one; "" if not.
    name: str = ""
    size: int = 0


@dataclass(frozen=True)
class LayerValues:
    """The forward computation of a layer of one kind, as its derivative reads it."""

    # How many layers there are of the kind.
    count: int
    # In the order in which they run; each reads from earlier ones.
    operations: tuple[Operation, ...]
    # The operations whose results are residuals, and whether the carry is one.
    residuals: frozenset[int]
    carry_is_residual: bool
    # Bytes of all residuals that depend on the carry.
    residual_bytes: int
    # FLOPs of running the layer.
    forward_flops: int

    # What was found for sets of names.
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def again(self, names: Collection[str]) -> tuple[set[int], set[int]]:
        """The operations that are computed again where values of these names are kept,
        and those whose results are kept and read.
        """
        again: set[int] = set()
        read: set[int] = set()
        waiting = [*self.residuals]
        while waiting:
            number = waiting.pop()
            operation = self.operations[number]
            if operation.is_data and operation.name in names:
                read.add(number)
            elif number not in again:
                again.add(number)
                waiting += operation.reads
        return again, read

    def kept(self, names: Collection[str]) -> "KeptValues":
        """The values of these names as one layer keeps them."""
        key = frozenset(names)
        if key not in self.known:
            again, read = self.again(key)
            sizes: Counter[str] = Counter()
            for number in read:
                operation = self.operations[number]
                sizes[operation.name] += operation.size
            flops = 0
            reads_carry = self.carry_is_residual
            for number in again:
                flops += self.operations[number].flops
                reads_carry |= self.operations[number].reads_carry
            self.known[key] = KeptValues(sizes, flops, reads_carry)
        return self.known[key]

    @property
    def keepable(self) -> list[Operation]:
        """The operations whose results can be kept in place of others."""
        again, _ = self.again(())
        operations = [self.operations[number] for number in sorted(again)]
        return [one for one in operations if one.name and one.is_data]


class KeptValues(NamedTuple):
    """Values that one layer keeps."""

    # Bytes of those that are read, by name.
    sizes: Mapping[str, float]
    # FLOPs of what is computed again beside them.
    again_flops: float
    # Whether that, or the derivative, reads the carry.
    reads_carry: bool


def layer_values(kind: Kind, perturbed: Perturbed, count: int) -> LayerValues:
    """The values of a layer of a kind, with a place for each that has no name."""
    of_inputs = kind.split([var.aval for var in kind.jaxpr.invars])
    types = tuple(map(tuple, of_inputs))
    whole = LayerPullback(kind, perturbed).residuals_of(types, EVERYTHING)
    named_kind = replace(kind, jaxpr=_with_places(kind.jaxpr), residuals={})
    pullback = LayerPullback(named_kind, perturbed)
    closed, structure = pullback.traced(types)
    inputs = len(closed.jaxpr.invars)
    _, carry, _ = kind.split(range(inputs))
    graph = _Graph()
    sources = [_DATA if place in carry else _GIVEN for place in range(inputs)]
    outputs = graph.add(closed.jaxpr, sources)
    results = len(outputs) - structure.num_leaves
    residuals = outputs[results:]
    return LayerValues(
        count,
        tuple(graph.operations),
        frozenset(number for number in residuals if number >= 0),
        _DATA in residuals,
        sum(map(bytes_of, whole.types)),
        count_flops(ClosedJaxpr(kind.jaxpr, ())).matmul,
    )


def _with_places(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr of a layer, with the name of its place for each result that a policy
    can keep.
    """
    types = [var.aval for var in jaxpr.invars]
    jaxpr = without_dead_code(jaxpr)

    def run(*inputs: Any) -> list[Any]:
        return evaluate_named(jaxpr, inputs, named)

    closed = jax.make_jaxpr(run)(*types)
    assert not closed.consts
    return closed.jaxpr


# Sources of values that no operation computes: the carry and the other inputs.
_DATA = -2
_GIVEN = -1


class _Graph:
    """Operations of a jaxpr and of the functions that it calls, in one list."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def add(self, jaxpr: Jaxpr, sources: Sequence[int]) -> list[int]:
        """Append the operations of a jaxpr whose inputs come from these; returns where
        its outputs come from.
        """
        known = dict(zip(jaxpr.invars, sources, strict=True))

        def source(atom: Any) -> int:
            return _GIVEN if isinstance(atom, Literal) else known.get(atom, _GIVEN)

        for equation in jaxpr.eqns:
            operands = [*map(source, equation.invars)]
            called = program_of(equation) if equation.primitive.name in CALLS else None
            called = getattr(called, "jaxpr", called)
            if called is not None and len(called.invars) == len(operands):
                results = self.add(called, operands)
            else:
                number = self._append(jaxpr, equation, operands)
                results = [number] * len(equation.outvars)
            known |= zip(equation.outvars, results, strict=True)
        return [*map(source, jaxpr.outvars)]

    def _append(self, jaxpr: Jaxpr, equation: Any, operands: Sequence[int]) -> int:
        reads = frozenset(number for number in operands if number >= 0)
        reads_carry = _DATA in operands
        is_data = reads_carry or any(self.operations[i].is_data for i in reads)
        flops = _flops_of(jaxpr, equation)
        name = name_given_by(equation)
        size = bytes_of(equation.outvars[0].aval) if name else 0
        operation = Operation(flops, reads, is_data, reads_carry, name, size)
        self.operations.append(operation)
        return len(self.operations) - 1


def _flops_of(jaxpr: Jaxpr, equation: Any) -> int:
    """The FLOPs of one equation of a jaxpr."""
    if name_given_by(equation):
        return 0
    operands = [var for var in equation.invars if not isinstance(var, Literal)]
    alone = jaxpr.replace(
        constvars=[],
        invars=[*dict.fromkeys(operands)],
        eqns=[equation],
        outvars=equation.outvars,
    )
    return count_flops(ClosedJaxpr(alone, ())).matmul


def differentiated_sweeps(
    jaxpr: Jaxpr, times: int = 1
) -> Iterator[tuple[SweepSpec, Perturbed, int, int]]:
    """The sweeps that a program runs to differentiate them, with what is
    differentiated, how often, and for how many examples at once (`jax.vmap`).

    Found are their forward sweeps, which are alike whatever visits the layers in
    reverse (`fused_update`, a pipeline).
    """
    for equation in jaxpr.eqns:
        fn: Any = getattr(primitive_of(equation), "fn", None)
        examples = 1
        while getattr(fn, "name", None) == "mapped":
            fn, axis, _ = fn.bound
            examples = examples * axis.size
        if getattr(fn, "name", None) == "sweep_forward":
            yield *fn.bound, times, examples
            continue
        trips = equation.params.get("length", 1)
        if equation.primitive.name != "scan" or not isinstance(trips, int):
            trips = 1
        for inner in jaxprs_in_params(equation.params):
            yield from differentiated_sweeps(
                getattr(inner, "jaxpr", inner), times * trips
            )


@dataclass(frozen=True)
class LayerStack:
    """The layers of one sweep of a program."""

    spec: SweepSpec
    # Of each kind.
    layers: tuple[LayerValues, ...]
    # How often the program runs the sweep, and of how many examples at once.
    times: int
    examples: int

    @property
    def carry_bytes(self) -> int:
        """Bytes of the carries of all examples."""
        one = sum(map(bytes_of, self.spec.of_held(self.spec.carry_types)))
        return self.examples * one

    @functools.cached_property
    def names(self) -> set[str]:
        """Names of values in its layers, of any kind."""
        operations = itertools.chain(*(layer.operations for layer in self.layers))
        return {operation.name for operation in operations}

    @property
    def keepable(self) -> list[tuple[LayerValues, Operation]]:
        """The operations of each kind whose results can be kept."""
        found = []
        for layer in self.layers:
            found += [(layer, operation) for operation in layer.keepable]
        return found

    def again_flops(self, names: Collection[str]) -> float:
        """FLOPs of what is computed again where values of these names are kept."""
        total = 0
        for layer in self.layers:
            total += layer.count * layer.kept(names).again_flops
        return self.times * total


@dataclass(frozen=True)
class ProgramValues:
    """The values inside all layers that a program differentiates."""

    stacks: tuple[LayerStack, ...]
    # Bytes of all values that can be kept, by name. Places are those that all stacks
    # have: others would refuse them.
    sizes: dict[str, int]

    @staticmethod
    def of(closed: ClosedJaxpr, policy: ScanCheckpointPolicy) -> "ProgramValues | None":
        """Those of a program that was traced with a policy that cuts its layers; None
        if it has no sweep under that policy, or one that may stop early.
        """
        stacks = []
        for spec, perturbed, times, examples in differentiated_sweeps(closed.jaxpr):
            if spec.stops == "until":
                return None  # how many layers run is not known
            remat = policy.for_layers(spec.length)
            # `"nested"` may have become segments of one length.
            may_differ = remat.may_keep_internals and spec.remat.may_keep_internals
            if spec.remat != remat and not may_differ:
                continue  # it has a policy of its own
            layers = []
            for kind in spec.kinds:
                layers.append(layer_values(kind, perturbed, spec.rows(kind)))
            stacks.append(LayerStack(spec, tuple(layers), times * examples, examples))
        if not stacks:
            return None
        sizes: Counter[str] = Counter()
        for stack in stacks:
            for layer, operation in stack.keepable:
                name = operation.name
                if not is_place(name) or all(name in other.names for other in stacks):
                    sizes[name] += layer.count * operation.size
        return ProgramValues(tuple(stacks), dict(sizes))

    def again_flops(self, names: Collection[str]) -> float:
        """FLOPs of what is computed again where values of these names are kept."""
        return sum(stack.again_flops(names) for stack in self.stacks)

    def choices(
        self, required: Collection[str] = (), without: Collection[str] = ()
    ) -> list[tuple[str, ...]]:
        """Names to keep, from the `required` alone to those for the fewest FLOPs.

        Of each number of FLOPs, in equal steps, those whose values take the fewest
        bytes; and others of as many names of the same kinds with equal bytes and FLOPs,
        which a compiler may give less memory.
        """
        if not self.sizes:
            return [()]
        program = _IntegerProgram(self, required, without)
        allowed = self.sizes.keys() - without
        most = self.again_flops(required)
        least = self.again_flops(allowed)
        found = {}
        for level in range(_LEVELS + 1):
            names = program.solve(most - (most - least) * level / _LEVELS)
            found[names] = None
        choices = []
        for names in found:
            choices += program.equals(names, self.again_flops(names))
        return choices


class _IntegerProgram:
    """The program at the top of this file. Its variables are names, and then
    operations.
    """

    def __init__(
        self,
        values: ProgramValues,
        required: Collection[str],
        without: Collection[str],
    ) -> None:
        self.names = [*values.sizes]
        self._place_of = {name: place for place, name in enumerate(self.names)}
        # FLOPs of each variable.
        self._flops = [0] * len(self.names)
        # Names of results of operations with FLOPs.
        self._products: set[str] = set()
        # Constraints `sum of coefficients >= lower bound`.
        self._rows: list[tuple[list[tuple[int, float]], float]] = []
        for stack in values.stacks:
            for layer in stack.layers:
                self._add(layer, stack.times * layer.count)
        variables = len(self._flops)
        self._unit = max(1, math.gcd(*self._flops))
        self._counts = np.array([count // self._unit for count in self._flops], float)
        self._costs = 1e-5 * self._counts / max(1.0, self._counts.sum())
        self._costs[: len(self.names)] = self._name_costs(values)
        entries = []
        for row, (terms, _) in enumerate(self._rows):
            entries += [(row, column, factor) for column, factor in terms]
        rows, columns, factors = zip(*entries, strict=True)
        shape = len(self._rows), variables
        matrix = scipy.sparse.coo_array((factors, (rows, columns)), shape=shape).tocsr()
        lower: Any = np.array([bound for _, bound in self._rows])
        self._constraint = scipy.optimize.LinearConstraint(matrix, lower)
        # SciPy's types of these are those of numbers.
        least: Any = np.zeros(variables)
        most: Any = np.ones(variables)
        for name in required:
            least[self._place_of[name]] = 1
        for name in self._place_of.keys() & without:
            most[self._place_of[name]] = 0
        self._bounds = scipy.optimize.Bounds(least, most)

    def _name_costs(self, values: ProgramValues) -> Any:
        """Shares of all bytes. Of equals the fewest names are best, and of these the
        author's own, then products.
        """
        sizes = np.array([*values.sizes.values()], float)
        costs = sizes / max(1.0, sizes.sum())
        for place, name in enumerate(self.names):
            if not is_place(name):
                costs[place] += 1e-6
            elif name in self._products:
                costs[place] += 3e-6
            else:
                costs[place] += 4e-6
        return costs

    def _add(self, layer: LayerValues, times: int) -> None:
        """Add a layer that runs so often."""
        again, _ = layer.again(())
        numbers = sorted(again)
        variables = range(len(self._flops), len(self._flops) + len(numbers))
        variable_of = dict(zip(numbers, variables, strict=True))
        # What makes the result of each operation known, of which one must be 1.
        ways: dict[int, list[tuple[int, float]]] = {}
        for number in numbers:
            operation = layer.operations[number]
            self._flops.append(times * operation.flops)
            ways[number] = [(variable_of[number], 1.0)]
            if operation.name in self._place_of and operation.is_data:
                ways[number].append((self._place_of[operation.name], 1.0))
            if any(layer.operations[read].flops for read in operation.reads):
                self._products.add(operation.name)
        for number in numbers:
            if number in layer.residuals:
                self._rows.append((ways[number], 1.0))
            reader = variable_of[number], -1.0
            for read in sorted(layer.operations[number].reads):
                self._rows.append(([*ways[read], reader], 0.0))

    def equals(self, names: tuple[str, ...], flops: float) -> list[tuple[str, ...]]:
        """A solution for so many FLOPs, and some others that are as good."""
        found = [names]
        while len(found) < _MOST_EQUALS:
            other = self.solve(flops, other_than=found)
            if other is None or self._cost(other) - self._cost(names) > 1e-7:
                break
            found.append(other)
        return found

    def _cost(self, names: Collection[str]) -> float:
        return sum(self._costs[self._place_of[name]] for name in names)

    def solve(
        self, flops: float, other_than: Sequence[Collection[str]] = ()
    ) -> tuple[str, ...] | None:
        """The names whose values take the fewest bytes, with at most so many FLOPs of
        what is computed again; None if there are no others than these.
        """
        most = flops // self._unit + 0.5
        constraints = [
            self._constraint,
            scipy.optimize.LinearConstraint(self._counts[None], ub=most),
        ]
        for names in other_than:
            # One of them is not kept, or one more is.
            differences = np.zeros(len(self._counts))
            differences[: len(self.names)] = 1
            for name in names:
                differences[self._place_of[name]] = -1
            constraints.append(
                scipy.optimize.LinearConstraint(differences[None], lb=1 - len(names))
            )
        found = scipy.optimize.milp(
            self._costs,
            constraints=constraints,
            # Also of operations, with which the solver is as fast, and more exact.
            integrality=np.ones(len(self._counts)),
            bounds=self._bounds,
            options={"mip_rel_gap": 0},
        )
        if found.x is None:
            assert other_than, found.message
            return None
        kept = zip(self.names, found.x, strict=False)
        return tuple(sorted(name for name, value in kept if value > 0.5))
