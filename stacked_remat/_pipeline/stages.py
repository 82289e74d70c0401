"""What one stage of a pipeline runs: a loop over the ticks of a schedule.

`Stages.run` is called within `jax.shard_map` over the axis of the stages, so all stages
trace one program. In each tick a stage looks up in the schedule what it does, runs that
branch (`_forward`, `_backward`, and before it `_weights`), and exchanges the results
with a neighbour. Between ticks it has a `StageState`.

A stage's forward pass is a fold of its layers, which keeps nothing; the stage keeps its
own input. Its backward pass runs them again by `fold_vjp`, which keeps what the policy
says, and sweeps back with a visitor that adds each layer's gradient to the sums. The
last stage has no forward pass of its own: it would compute what its backward pass, the
next thing that it does, computes.

What goes from stage to stage (`Passed`) is the carry, and for a loss that scans the
outputs of all layers, of which each stage fills in its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from jax import lax

from .. import _xla_hints as xla_hints
from .._activity import is_differentiable
from .._fused.folds import leaves_or_none
from .._scan.layer_axis import part_of_layers, split_tree
from .._scan.marks import is_array
from .._scan.until import CountedCarry
from .._scan.visitor import LayerResult, LayerVisit, SweepResult
from .._stacked import Stacked
from .._static import PyTree, with_leaves
from .._sweep.gradient import merge, pick
from .._sweep.slots import inverted
from .._sweep.store import read, write, zeros_of
from .._sweep.trace import weak_as
from .._trips import known_branches, known_trips
from .loss_parts import LossParts
from .schedule import BACKWARD, FORWARD, Schedule, exchanges
from .two_cotangents import LateCotangents, TwoCotangents, take_apart


class Passed(NamedTuple):
    """What a stage sends to the next. Cotangents of it, which are sent back, are of
    floating-point arrays alone.
    """

    carry: list[Any]
    # The outputs of the rows of all stages, with zeros for those of later stages; []
    # for a fold
    outputs: list[Any]


class StageState(NamedTuple):
    """What a stage has between two ticks."""

    # What a neighbour has sent, or what is to be sent
    passed: Passed
    cotangents: Passed
    # The inputs of the microbatches in flight, `[slot, ...]`
    inputs: Passed
    # What W reads, `[slot, layer, ...]`; [] where it is not taken apart
    kept: list[Any]
    # The sums of the gradients of this stage's layers
    layers: list[Any]
    # The sums of the gradients of the rest of the model: on the first stage of what
    # comes before the fold, on the last of what comes after it
    rest: list[Any]
    # The mean of the loss over microbatches, and what else it returns of each; on the
    # last stage, elsewhere zeros
    value: Any
    aux: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The program of the stages of a pipeline."""

    # The axis of the mesh that has a stage on each of its devices
    axis: str
    schedule: Schedule
    parts: LossParts
    # Whether the loss returns a pair
    has_aux: bool
    # The axis of all layers
    Layers: Axis
    # The stack of this stage, which has as many rows on each stage: those of its
    # layers, and after these some that are never read (`_count`)
    layers: Stacked
    # For each leaf of a layer, None being one, whether it is trained
    is_trained: Sequence[bool]
    # What is trained of the rest of the model
    trained: list[Any]
    # From these to the leaves of the rest of the model
    rest: Callable[[Sequence[Any]], list[Any]]
    # From a number to the leaves of the other arguments of the loss
    microbatch: Callable[[Any], list[Any]]
    # For each operand of the fold whether it depends on what is trained in the rest
    is_active: Sequence[bool]
    # In which gradients of real weights are added; None for that of the weights
    dtype: Any

    def run(self) -> StageState:
        """All ticks. What is left are the sums of this stage."""
        late = self._late_cotangents() if self.schedule.is_split else None
        schedule = self.schedule
        operations, numbers, weights_done = map(
            jnp.asarray,
            (schedule.operations, schedule.numbers, schedule.weights_done),
        )

        # For counts of FLOPs: each runs once for each microbatch
        once_each = functools.partial(
            known_trips, schedule.microbatches, schedule.ticks
        )
        backward = functools.partial(self._backward, late)

        def tick(time: Any, state: StageState) -> StageState:
            if late is not None:
                done = weights_done[jnp.maximum(time - 1, 0), self._stage]
                until = weights_done[time, self._stage]
                add = functools.partial(self._weights, late, state.kept)
                with once_each():
                    layers = lax.fori_loop(done, until, add, state.layers)
                state = state._replace(layers=layers)
            operation = operations[time, self._stage]
            number = numbers[time, self._stage]
            with once_each():
                state = xla_hints.run_if(
                    operation == FORWARD, self._forward, number, state
                )
                state = xla_hints.run_if(operation == BACKWARD, backward, number, state)
            return self._exchanged(time, state)

        return lax.fori_loop(0, schedule.ticks, tick, self._first_state(late))

    def run_forward(self) -> StageState:
        """The loss alone: at tick t stage s runs microbatch t - s, and sends it on."""
        count = self.schedule.microbatches
        stages = self.schedule.stages
        ticks = count + stages - 1
        pairs = [(stage, stage + 1) for stage in range(stages - 1)]

        def tick(time: Any, state: StageState) -> StageState:
            number = time - self._stage
            is_one = (number >= 0) & (number < count)
            with known_trips(count, ticks):
                state = xla_hints.run_if(is_one, self._evaluated, number, state)
            return state._replace(passed=lax.ppermute(state.passed, self.axis, pairs))

        # No input is kept, and no cotangent sent
        none = Passed([], [])
        first = self._first_state(None)._replace(inputs=none, cotangents=none)
        return lax.fori_loop(0, ticks, tick, first)

    # --- What is run in a tick

    def _forward(self, number: Any, state: StageState) -> StageState:
        """F: keep the input, and send the output on."""
        passed = self._input(number, state)
        folded = functools.partial(self._folded, number, passed)
        # That of the last stage would be for no one
        with known_branches([self.schedule.stages - 1, 1]):
            after = lax.cond(self._is_last, lambda: passed, folded)
        inputs = write(state.inputs, number % self._slots, passed)
        return state._replace(inputs=inputs, passed=after)

    def _evaluated(self, number: Any, state: StageState) -> StageState:
        """Send the output on; on the last stage, the loss."""
        after = self._folded(number, self._input(number, state))

        def loss(number: Any, state: StageState) -> StageState:
            value, aux = self._returned(number, self.trained, after)
            return self._with_loss(number, value, aux, state)

        with known_trips(1):
            state = xla_hints.run_if(self._is_last, loss, number, state)
        return state._replace(passed=after)

    def _input(self, number: Any, state: StageState) -> Passed:
        """What this stage's layers begin with: what comes before the fold, or what the
        stage before has sent.
        """

        def first() -> Passed:
            init, _, _ = self._operands(number, self.trained)
            return Passed(init, [*map(jnp.zeros_like, state.passed.outputs)])

        return lax.cond(self._is_first, first, lambda: state.passed)

    def _folded(self, number: Any, passed: Passed) -> Passed:
        """What this stage's layers make of it; nothing is kept."""
        return self._after(passed, self._called("", number, passed))

    def _backward(
        self, late: LateCotangents | None, number: Any, state: StageState
    ) -> StageState:
        """B: sweep back over the layers, and send the cotangent of the input back."""
        passed = read(state.inputs, number % self._slots)
        result, sweep_back = self._called("_vjp", number, passed)
        after = self._after(passed, result)
        loss = functools.partial(self._loss, after)
        with known_trips(1):
            state = xla_hints.run_if(self._is_last, loss, number, state)
        cotangent = self._cotangent_of(result, state.cotangents)
        if late is None:
            swept = sweep_back(cotangent, self._added, layer_state=state.layers)
            state = state._replace(layers=swept.layer_state)
        else:
            is_early = inverted(late.is_late)
            kept = [zeros_of(type_, (self._rows,)) for type_ in late.kept]
            before = pick(state.layers, is_early), kept
            visitor = functools.partial(self._added_early, late)
            swept = sweep_back(cotangent, visitor, layer_state=before)
            early, kept = swept.layer_state
            state = state._replace(
                layers=merge(state.layers, early, is_early),
                kept=write(state.kept, number % self._slots, kept),
            )
        carry = _cotangents(_of_user(swept.carry), self._carry(passed))
        sent = state.cotangents._replace(carry=pick(carry, self._is_float(carry)))
        state = state._replace(cotangents=sent)
        return self._pulled_back(number, carry, swept, state)

    def _weights(
        self, late: LateCotangents, kept: list[Any], number: Any, sums: list[Any]
    ) -> list[Any]:
        """W: add the cotangents of weights that B left to the sums."""
        _, args, kwargs = self._operands(number, self.trained)
        arguments = (self.layers._stored, *args), kwargs
        split = split_tree(arguments, self.layers.Layers, self.layers._caller)
        of_microbatch = read(kept, number % self._slots)

        def add(layer: Any, sums: list[Any]) -> list[Any]:
            available = _arrays(split.layer(layer))
            found = late.run(available, read(of_microbatch, layer))
            return write(sums, layer, [*map(_sum, read(sums, layer), found)])

        of_late = pick(sums, late.is_late)
        with known_trips(self._rows):
            of_late = lax.fori_loop(0, self._count, add, of_late)
        return merge(sums, of_late, late.is_late)

    def _exchanged(self, time: Any, state: StageState) -> StageState:
        """What the neighbour of this tick has sent in the place of what is sent.

        `ppermute` gives zeros to a stage to which none sends, as to the first of a pair
        in place of its carry. They overwrite nothing that is read again: what a stage
        makes is sent after the tick in which it was made, and what it receives is used
        in the next (`schedule.py`).
        """

        def at(parity: int) -> Callable[..., tuple[Passed, Passed]]:
            pairs = [*exchanges(parity, self.schedule.stages)]
            back = [(second, first) for first, second in pairs]

            def exchange(passed: Passed, cotangents: Passed) -> tuple[Passed, Passed]:
                if not pairs:
                    return passed, cotangents
                received = lax.ppermute(passed, self.axis, pairs)
                return received, lax.ppermute(cotangents, self.axis, back)

            return exchange

        # All stages are at the same tick, so all take the same branch
        is_even = time % 2 == 0
        passed, cotangents = lax.cond(
            is_even, at(0), at(1), state.passed, state.cotangents
        )
        return state._replace(passed=passed, cotangents=cotangents)

    # --- The parts of the backward pass

    def _called(self, suffix: str, number: Any, passed: Passed) -> Any:
        """The result of this stage's layers; with `"_vjp"` also their reverse sweep."""
        _, args, kwargs = self._operands(number, self.trained)
        carry = self._carry(passed)
        if not self._is_even:
            carry = CountedCarry(self._count, carry)
        return self.parts.fold.call(suffix, self.layers, carry, args, kwargs)

    def _loss(self, after: Passed, number: Any, state: StageState) -> StageState:
        """On the last stage: the loss, and the cotangents of what the layers made."""
        masks = Passed(*map(self._is_float, after))

        def loss(trained: list[Any], floats: Passed) -> tuple[Any, list[Any]]:
            changed = Passed(*map(merge, after, floats, masks))
            return self._returned(number, trained, changed)

        floats = Passed(*map(pick, after, masks))
        value, pullback, aux = jax.vjp(loss, self.trained, floats, has_aux=True)
        of_trained, cotangents = pullback(jnp.ones_like(value))
        state = self._with_loss(number, value, aux, state)
        rest = [*map(_sum, state.rest, of_trained)]
        return state._replace(cotangents=cotangents, rest=rest)

    def _returned(
        self, number: Any, trained: Sequence[Any], after: Passed
    ) -> tuple[Any, list[Any]]:
        """The part of a microbatch in the mean of the loss, and the arrays of aux."""
        inputs = [*self.rest(trained), *self.microbatch(number)]
        outputs = [rows[: self.Layers.size] for rows in after.outputs]
        returned = self.parts.results(inputs, [*after.carry, *outputs])
        value, aux = returned if self.has_aux else (returned, None)
        return value / self.schedule.microbatches, _arrays(aux)

    def _with_loss(
        self, number: Any, value: Any, aux: Sequence[Any], state: StageState
    ) -> StageState:
        aux = write(state.aux, number, [*map(_strong, aux)])
        return state._replace(value=state.value + value, aux=aux)

    def _pulled_back(
        self, number: Any, carry: list[Any], swept: SweepResult, state: StageState
    ) -> StageState:
        """On the first stage: add the gradients of what comes before the fold. On all,
        where further arguments of the layers depend on trained arrays.
        """
        if not any(self.is_active):
            return state

        def pull_back(number: Any, rest: list[Any]) -> list[Any]:
            def active(trained: list[Any]) -> list[Any]:
                init, args, kwargs = self._operands(number, trained)
                return pick([*init, *_arrays((args, kwargs))], self.is_active)

            cotangents = []
            for leaf in carry:
                zeros = jnp.zeros_like(leaf)
                cotangents.append(jnp.where(self._is_first, leaf, zeros))
            if self._arguments_are_active:
                _, args, kwargs = self._operands(number, self.trained)
                of_args = swept.args, swept.kwargs
                cotangents += _cotangents(of_args, (args, kwargs))
            else:
                cotangents += [None] * (len(self.is_active) - len(carry))
            _, pullback = jax.vjp(active, self.trained)
            (gradients,) = pullback(pick(cotangents, self.is_active))
            return [*map(_sum, rest, gradients)]

        if self._arguments_are_active:
            rest = pull_back(number, state.rest)
        else:
            with known_trips(1):
                rest = xla_hints.run_if(self._is_first, pull_back, number, state.rest)
        return state._replace(rest=rest)

    # --- Visitors

    def _added(self, visit: LayerVisit, state: None) -> LayerResult:
        """Add the gradient of a layer to the sums, which are the layers' state."""
        found = visit.vjp()
        gradients = pick(leaves_or_none(found.layer), self.is_trained)
        sums = [*map(_sum, visit.layer_state, gradients)]
        result = LayerResult(found.carry, layer_state=sums)
        if self._arguments_are_active:
            result = result._replace(args=found.args, kwargs=found.kwargs)
        return result

    def _added_early(
        self, expected: LateCotangents, visit: LayerVisit, state: None
    ) -> LayerResult:
        """Add what B has of the gradient of a layer, and keep what W reads."""
        divided, structure = self._divided(visit)
        if not divided.late.is_like(expected):
            raise ValueError(
                f"The policy {self.layers.remat!r} reverses some layers of"
                f" {self.parts.fold.name} in another way than others, and zero_bubble"
                " takes all apart in one way. Use schedule='1f1b', or another policy."
            )
        others, early, kept = divided.run_early()
        result = jax.tree.unflatten(structure, others)
        sums, _ = visit.layer_state
        sums = [*map(_sum, sums, early)]
        return result._replace(layer_state=(sums, [*map(_strong, kept)]))

    def _divided(self, visit: LayerVisit) -> tuple[TwoCotangents, Any]:
        """The backward pass of a layer taken apart, and the structure of the
        `LayerResult` of cotangents that are not of weights.
        """
        structures = []

        def vjp() -> tuple[list[Any], list[Any]]:
            found = visit.vjp()
            result = LayerResult(found.carry)
            if self._arguments_are_active:
                result = result._replace(args=found.args, kwargs=found.kwargs)
            others, structure = jax.tree.flatten(result)
            structures.append(structure)
            return others, pick(leaves_or_none(found.layer), self.is_trained)

        available = _arrays(((visit.layer, *visit.args), visit.kwargs))
        return take_apart(vjp, available, _arrays(visit.carry)), structures[0]

    def _late_cotangents(self) -> LateCotangents:
        """W of any layer, found by a visit that is traced and not run."""
        found = []

        def visitor(visit: LayerVisit, state: None) -> LayerResult:
            found.append(self._divided(visit)[0].late)
            return LayerResult(visit.vjp().carry)

        def visited() -> PyTree:
            passed = self._first_state(None).passed
            result, sweep_back = self._called("_vjp", 0, passed)
            zeros = jax.tree.map(
                jnp.zeros_like, eqx.filter(result, eqx.is_inexact_array)
            )
            return sweep_back(zeros, visitor).carry

        jax.eval_shape(visited)
        return found[0]

    # --- Trees and their leaves

    @property
    def _stage(self) -> Any:
        return lax.axis_index(self.axis)

    @property
    def _is_first(self) -> Any:
        return self._stage == 0

    @property
    def _is_last(self) -> Any:
        return self._stage == self.schedule.stages - 1

    @property
    def _rows(self) -> int:
        """How many layers a stage may have."""
        return self.layers.Layers.size

    @property
    def _is_even(self) -> bool:
        return self._rows * self.schedule.stages == self.Layers.size

    @property
    def _count(self) -> Any:
        """How many layers this stage has: the last stages may have fewer, or none."""
        if self._is_even:
            return self._rows
        return jnp.clip(self.Layers.size - self._stage * self._rows, 0, self._rows)

    @property
    def _slots(self) -> int:
        # Those in flight follow each other, so their numbers modulo this differ
        return min(self.schedule.stages, self.schedule.microbatches)

    @property
    def _arguments_are_active(self) -> bool:
        """Whether an argument of the fold, beside the carry, has a gradient."""
        _, init, _, _ = self.parts.fold.in_avals
        return any(self.is_active[len(jax.tree.leaves(init)) :])

    def _operands(
        self, number: Any, trained: Sequence[Any]
    ) -> tuple[list[Any], tuple[PyTree, ...], dict[str, PyTree]]:
        """The leaves of the first carry of a microbatch, and the arguments of this
        stage's layers, as a fold takes them.
        """
        inputs = [*self.rest(trained), *self.microbatch(number)]
        _, *types = self.parts.fold.in_avals
        _, *static = self.parts.fold.static.value
        operands = with_leaves(types, self.parts.operands(inputs))
        init, args, kwargs = eqx.combine(operands, static)
        # None in the block's place: paths into arguments count it
        arguments = (None, *args), kwargs
        first = self._stage * self._rows
        (_, *args), kwargs = part_of_layers(
            arguments, self.Layers, first, self._rows, self.layers._caller
        )
        leaves = []
        for leaf, type_ in zip(_arrays(init), self._carry_types, strict=True):
            leaves.append(_strong(leaf, type_.dtype))
        return leaves, tuple(args), kwargs

    @property
    def _carry_types(self) -> list[Any]:
        """Of the arrays of the carry, as layers return it. A number that is the first
        carry takes the type that it meets there.
        """
        result = self.parts.fold.out_aval
        return jax.tree.leaves(result[0] if self._is_scan else result)

    def _carry(self, passed: Passed) -> PyTree:
        """The carry with its arrays; those that are weakly typed are so in layers."""
        _, init, _, _ = self.parts.fold.in_avals
        _, static, _, _ = self.parts.fold.static.value
        leaves = [*map(weak_as, passed.carry, self._carry_types)]
        return eqx.combine(with_leaves(init, leaves), static)

    def _after(self, passed: Passed, result: PyTree) -> Passed:
        """What goes on after this stage's layers."""
        outputs: list[Any] = []
        carry = result
        if self._is_scan:
            carry, of_layers = result
            first = self._stage * self._rows
            for stack, rows in zip(passed.outputs, _arrays(of_layers), strict=True):
                outputs.append(lax.dynamic_update_slice_in_dim(stack, rows, first, 0))
        return Passed([*map(_strong, _arrays(_of_user(carry)))], outputs)

    def _cotangent_of(self, result: PyTree, cotangents: Passed) -> PyTree:
        """The cotangent of the result of this stage's layers."""
        first = self._stage * self._rows
        leaves = [*cotangents.carry]
        for stack in cotangents.outputs:
            leaves.append(lax.dynamic_slice_in_dim(stack, first, self._rows))
        return with_leaves(eqx.filter(result, eqx.is_inexact_array), leaves)

    @property
    def _is_scan(self) -> bool:
        return self.parts.fold.verb == "scan"

    def _is_float(self, leaves: Sequence[Any]) -> list[bool]:
        return [is_differentiable(leaf.dtype) for leaf in leaves]

    def _first_state(self, late: LateCotangents | None) -> StageState:
        """Zeros: nothing is in flight, and no gradient is summed. It has the types of
        all states; `late` is W, where that is taken apart.
        """
        outputs = []
        if self._is_scan:
            rows_of_all = self._rows * self.schedule.stages
            for type_ in jax.tree.leaves(self.parts.fold.out_aval[1]):
                shape = rows_of_all, *type_.shape[1:]
                outputs.append(type_.update(shape=shape))
        types = Passed(self._carry_types, outputs)
        floats = Passed(*(pick(leaves, self._is_float(leaves)) for leaves in types))
        slots = self._slots
        kept = []
        if late is not None:
            for type_ in late.kept:
                kept.append(zeros_of(type_, (slots, self._rows)))
        returned = self.parts.returned
        value, aux = returned if self.has_aux else (returned, None)
        sums = pick(leaves_or_none(self.layers), self.is_trained)
        return StageState(
            passed=jax.tree.map(zeros_of, types),
            cotangents=jax.tree.map(zeros_of, floats),
            inputs=jax.tree.map(lambda type_: zeros_of(type_, (slots,)), types),
            kept=kept,
            layers=[*map(self._sum_of, sums)],
            rest=[*map(self._sum_of, self.trained)],
            value=jnp.zeros((), value.dtype),
            aux=[
                jnp.zeros((self.schedule.microbatches, *leaf.shape), leaf.dtype)
                for leaf in _arrays(aux)
            ],
        )

    def _sum_of(self, weight: Any) -> Any:
        """Zeros, to which gradients of a weight are added."""
        is_complex = jnp.issubdtype(weight.dtype, jnp.complexfloating)
        return jnp.zeros_like(weight, dtype=None if is_complex else self.dtype)


def _of_user(carry: PyTree) -> PyTree:
    """A carry, or its cotangent, without the number of layers that are left."""
    return carry.carry if isinstance(carry, CountedCarry) else carry


def _arrays(tree: PyTree) -> list[Any]:
    return [*filter(is_array, jax.tree.leaves(tree))]


def _cotangents(cotangent: PyTree, like: PyTree) -> list[Any]:
    """For each array of a tree its cotangent; zeros where there is none."""
    leaves = []
    pairs = zip(leaves_or_none(like), leaves_or_none(cotangent), strict=True)
    for array, leaf in pairs:
        if is_array(array):
            leaves.append(jnp.zeros_like(array) if leaf is None else leaf)
    return leaves


def _sum(total: Any, cotangent: Any) -> Any:
    return total + cotangent.astype(total.dtype)


def _strong(leaf: Any, dtype: Any = None) -> Any:
    """An array without a weak type, as branches have to return the same types; and of
    another dtype.
    """
    dtype = leaf.dtype if dtype is None else dtype
    is_other = jax.typeof(leaf).weak_type or leaf.dtype != dtype
    return lax.convert_element_type(leaf, dtype) if is_other else leaf
