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

What goes from stage to stage is the carry, and for a loss that scans the outputs of all
layers, of which each stage fills in its own. That, and a stage's layers as a fold, are
in `stage_layers.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .. import _xla_hints as xla_hints
from .._activity import is_differentiable
from .._fused.folds import leaves_or_none
from .._scan.visitor import LayerResult, LayerVisit, SweepResult
from .._static import PyTree
from .._sweep.gradient import merge, pick
from .._sweep.slots import inverted
from .._sweep.store import read, write, zeros_of
from .._trips import known_branches, known_trips
from .loss_parts import LossParts
from .schedule import BACKWARD, FORWARD, Schedule, exchanges
from .stage_layers import (
    Arguments,
    Passed,
    StageLayers,
    arrays_of,
    cotangents_of,
    strong,
)
from .two_cotangents import LateCotangents, TwoCotangents, take_apart


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
    # This stage's part of the stack
    layers: StageLayers
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

        # For counts of FLOPs: each runs once for each microbatch. What one stage alone
        # runs of it is counted by `known_trips(1, stages)`.
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

        with known_trips(1, self.schedule.stages):
            state = xla_hints.run_if(self._is_last, loss, number, state)
        return state._replace(passed=after)

    def _input(self, number: Any, state: StageState) -> Passed:
        """What this stage's layers begin with: what comes before the fold, or what the
        stage before has sent.
        """

        def first() -> Passed:
            init, _ = self._operands(number, self.trained)
            return Passed(init, [*map(jnp.zeros_like, state.passed.outputs)])

        with known_branches([self.schedule.stages - 1, 1]):
            return lax.cond(self._is_first, first, lambda: state.passed)

    def _folded(self, number: Any, passed: Passed) -> Passed:
        """What this stage's layers make of it; nothing is kept."""
        _, arguments = self._operands(number, self.trained)
        return self.layers.applied(passed, arguments)

    def _backward(
        self, late: LateCotangents | None, number: Any, state: StageState
    ) -> StageState:
        """B: sweep back over the layers, and send the cotangent of the input back."""
        passed = read(state.inputs, number % self._slots)
        _, arguments = self._operands(number, self.trained)
        result, sweep_back = self.layers.vjp(passed, arguments)
        after = self.layers.after(passed, result)
        loss = functools.partial(self._loss, after)
        with known_trips(1, self.schedule.stages):
            state = xla_hints.run_if(self._is_last, loss, number, state)
        cotangent = self.layers.cotangent(result, state.cotangents)
        if late is None:
            swept = sweep_back(cotangent, self._added, layer_state=state.layers)
            state = state._replace(layers=swept.layer_state)
        else:
            is_early = inverted(late.is_late)
            kept = [zeros_of(type_, (self.layers.rows,)) for type_ in late.kept]
            before = pick(state.layers, is_early), kept
            visitor = functools.partial(self._added_early, late)
            swept = sweep_back(cotangent, visitor, layer_state=before)
            early, kept = swept.layer_state
            state = state._replace(
                layers=merge(state.layers, early, is_early),
                kept=write(state.kept, number % self._slots, kept),
            )
        carry = self.layers.carry_cotangents(swept, passed)
        sent = state.cotangents._replace(carry=pick(carry, self._is_float(carry)))
        state = state._replace(cotangents=sent)
        return self._pulled_back(number, carry, swept, state)

    def _weights(
        self, late: LateCotangents, kept: list[Any], number: Any, sums: list[Any]
    ) -> list[Any]:
        """W: add the cotangents of weights that B left to the sums."""
        _, arguments = self._operands(number, self.trained)
        split = self.layers.split(arguments)
        of_microbatch = read(kept, number % self._slots)

        def add(layer: Any, sums: list[Any]) -> list[Any]:
            available = arrays_of(split.layer(layer))
            found = late.run(available, read(of_microbatch, layer))
            return write(sums, layer, [*map(_sum, read(sums, layer), found)])

        of_late = pick(sums, late.is_late)
        with known_trips(self.layers.rows):
            of_late = lax.fori_loop(0, self.layers.count, add, of_late)
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
        folded = [*after.carry, *self.layers.outputs_of_layers(after)]
        returned = self.parts.results(inputs, folded)
        value, aux = returned if self.has_aux else (returned, None)
        return value / self.schedule.microbatches, arrays_of(aux)

    def _with_loss(
        self, number: Any, value: Any, aux: Sequence[Any], state: StageState
    ) -> StageState:
        aux = write(state.aux, number, [*map(strong, aux)])
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
                init, arguments = self._operands(number, trained)
                return pick([*init, *arrays_of(arguments)], self.is_active)

            cotangents = []
            for leaf in carry:
                zeros = jnp.zeros_like(leaf)
                cotangents.append(jnp.where(self._is_first, leaf, zeros))
            if self._arguments_are_active:
                _, arguments = self._operands(number, self.trained)
                of_arguments = Arguments(swept.args, swept.kwargs)
                cotangents += cotangents_of(of_arguments, arguments)
            else:
                cotangents += [None] * (len(self.is_active) - len(carry))
            _, pullback = jax.vjp(active, self.trained)
            (gradients,) = pullback(pick(cotangents, self.is_active))
            return [*map(_sum, rest, gradients)]

        if self._arguments_are_active:
            rest = pull_back(number, state.rest)
        else:
            with known_trips(1, self.schedule.stages):
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
                f"The policy {self.layers.stack.remat!r} reverses some layers of"
                f" {self.parts.fold.name} in another way than others, and zero_bubble"
                " takes all apart in one way. Use schedule='1f1b', or another policy."
            )
        others, early, kept = divided.run_early()
        result = jax.tree.unflatten(structure, others)
        sums, _ = visit.layer_state
        sums = [*map(_sum, sums, early)]
        return result._replace(layer_state=(sums, [*map(strong, kept)]))

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

        available = arrays_of(((visit.layer, *visit.args), visit.kwargs))
        return take_apart(vjp, available, arrays_of(visit.carry)), structures[0]

    def _late_cotangents(self) -> LateCotangents:
        """W of any layer, found by a visit that is traced and not run."""
        found = []

        def visitor(visit: LayerVisit, state: None) -> LayerResult:
            found.append(self._divided(visit)[0].late)
            return LayerResult(visit.vjp().carry)

        def visited() -> PyTree:
            passed = self._first_state(None).passed
            _, arguments = self._operands(0, self.trained)
            result, sweep_back = self.layers.vjp(passed, arguments)
            zeros = jax.tree.map(
                jnp.zeros_like, eqx.filter(result, eqx.is_inexact_array)
            )
            return sweep_back(zeros, visitor).carry

        jax.eval_shape(visited)
        return found[0]

    # --- Trees and their leaves

    @property
    def _stage(self) -> Any:
        return self.layers.stage

    @property
    def _is_first(self) -> Any:
        return self._stage == 0

    @property
    def _is_last(self) -> Any:
        return self._stage == self.schedule.stages - 1

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
    ) -> tuple[list[Any], Arguments]:
        """The leaves of the first carry of a microbatch, and the arguments of this
        stage's layers.
        """
        inputs = [*self.rest(trained), *self.microbatch(number)]
        return self.layers.operands(self.parts.operands(inputs))

    def _is_float(self, leaves: Sequence[Any]) -> list[bool]:
        return [is_differentiable(leaf.dtype) for leaf in leaves]

    def _first_state(self, late: LateCotangents | None) -> StageState:
        """Zeros: nothing is in flight, and no gradient is summed. It has the types of
        all states; `late` is W, where that is taken apart.
        """
        types = self.layers.passed_types
        floats = Passed(*(pick(leaves, self._is_float(leaves)) for leaves in types))
        slots = self._slots
        kept = []
        if late is not None:
            for type_ in late.kept:
                kept.append(zeros_of(type_, (slots, self.layers.rows)))
        returned = self.parts.returned
        value, aux = returned if self.has_aux else (returned, None)
        sums = pick(leaves_or_none(self.layers.stack), self.is_trained)
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
                for leaf in arrays_of(aux)
            ],
        )

    def _sum_of(self, weight: Any) -> Any:
        """Zeros, to which gradients of a weight are added."""
        is_complex = jnp.issubdtype(weight.dtype, jnp.complexfloating)
        return jnp.zeros_like(weight, dtype=None if is_complex else self.dtype)


def _sum(total: Any, cotangent: Any) -> Any:
    return total + cotangent.astype(total.dtype)
