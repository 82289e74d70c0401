"""Experts that are divided over devices (expert parallelism): tokens go to their
experts and back.

Every (token, expert) pair is sent to the device that has the expert, in rounds: in
each, a device sends as many rows to every other, with padding where it has fewer.
Rounds go on until all have sent everything, so no token is dropped, and memory is that
of one round for any routing. The backward pass sends the rows again: none of what was
received is kept for it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from .._sweep.store import zeros_after
from .._trips import known_trips
from ._expert_loop import (
    Inputs,
    add_at,
    added,
    loop_gradients,
    masked,
    rows_at,
    sorted_pairs,
)
from ._perturbed_vjp import perturbed_vjp, vjp_of_part

_PARTS = 8  # rounds of an even routing, and about one more where it is uneven
_MOST_BYTES = 2**29  # of the rows of a round


def devices_along(over: Sequence[str]) -> int:
    """How many devices there are along axes of the mesh that `jax.shard_map` has made
    manual.
    """
    try:
        return math.prod(lax.axis_size(one) for one in over)
    except NameError:
        raise ValueError(
            f"`over` divides experts over {tuple(over)}, which are not all manual axes"
            " of a mesh here: call grouped_experts inside jax.shard_map over them, or"
            " leave `over` out."
        ) from None


class _Routes(NamedTuple):
    order: Int[Array, " pair"]  # the pairs by the device that they go to
    first: Int[Array, " device"]  # in `order`, of each device
    counts: Int[Array, " device"]  # how many go to each device
    expert: Int[Array, " pair"]  # each pair's, numbered on its device
    rounds: Int[Array, ""]  # that the device with most to send needs


class _Sent(NamedTuple):
    """The pairs of one round, those that are padding among them."""

    pair: Int[Array, "device slot"]
    real: Bool[Array, "device slot"]


@dataclass(frozen=True, eq=False)
class Exchange:
    """How rows are exchanged, in a loop over rounds."""

    over: tuple[str, ...]  # the axes of the mesh over which experts are divided
    devices: int  # along these
    slots: int  # rows that a device sends to each other one in a round
    even_rounds: int  # that an even routing takes
    experts: int  # of each device
    # Rows that have arrived, choices, gates and weights to sums over this device's
    # experts; -1 chooses none.
    apply: Callable[[Array, Array, Array, Sequence[Array]], Array]

    @staticmethod
    def of(
        over: Sequence[str], pairs: int, row_bytes: int, experts: int, apply: Any
    ) -> "Exchange":
        """For so many (token, expert) pairs on each device."""
        devices = devices_along(over)
        to_each = -(-pairs // devices)  # where routing is even
        most_slots = _MOST_BYTES // (devices * row_bytes)
        slots = max(min(-(-to_each // _PARTS), most_slots), 1)
        even_rounds = -(-to_each // slots)
        return Exchange(tuple(over), devices, slots, even_rounds, experts, apply)

    def run(
        self, x: Array, choices: Array, gates: Array, weights: Sequence[Array]
    ) -> Array:
        numbers = choices.astype(jnp.int32)
        # Out-of-range choices are sorted last and go nowhere.
        _, order, counts = sorted_pairs(numbers // self.experts, self.devices)
        # All devices take part in every exchange, so they have as many.
        rounds = lax.pmax(-(-jnp.max(counts) // self.slots), self.over)
        first = jnp.cumsum(counts) - counts
        # Devices have consecutive experts.
        own = numbers.reshape(-1) % self.experts
        routes = _Routes(order, first, counts, own, rounds)
        return _exchanged(self, Inputs(x, gates, tuple(weights)), routes)

    def swap(self, rows: Array) -> Array:
        """All-to-all over the first axis of `[device, slot, ...]`. Its own inverse."""
        return lax.all_to_all(rows, self.over, split_axis=0, concat_axis=0, tiled=True)

    def sent(self, routes: _Routes, i: Array) -> _Sent:
        """The pairs of round `i`, by the device to which they go."""
        within = jnp.arange(self.slots, dtype=jnp.int32)[None, :]
        slot = i * self.slots + within
        last = routes.order.shape[0] - 1
        # Slots after a device's last pair are not real, and may have any.
        place = jnp.minimum(routes.first[:, None] + slot, last)
        pair = routes.order[place]
        return _Sent(pair, slot < routes.counts[:, None])

    def results(self, own: Inputs, routes: _Routes, sent: _Sent) -> Array:
        """The results of this device's experts, for rows that it gets; `own` has those
        that it sends.
        """
        x = self.given(own.x, sent)
        gates = self.given(own.gates, sent)[:, None]
        choices = jnp.where(sent.real, routes.expert[sent.pair], -1)
        choices = self.swap(choices).reshape(-1, 1)
        return self.apply(x, choices, gates, own.weights)

    def given(self, rows: Array, sent: _Sent) -> Array:
        """The rows that this device gets where each sends such, `[device, slot,
        ...]`.
        """
        arrived = self.swap(masked(rows, sent.real))
        return arrived.reshape(-1, *rows.shape[2:])

    def forward(self, inputs: Inputs, routes: _Routes) -> Array:
        def one(i: Array, out: Array) -> Array:
            sent = self.sent(routes, i)
            rows = self.results(inputs.at(sent.pair, inputs.weights), routes, sent)
            back = self.swap(rows.reshape(self.devices, self.slots, -1))
            return add_at(out, inputs.tokens(sent.pair), masked(back, sent.real))

        choices = routes.expert.reshape(inputs.gates.shape)
        result = jax.eval_shape(self.apply, inputs.x, choices, *inputs[1:])
        # What comes back in several rounds for a token is added unrounded.
        sums = jax.ShapeDtypeStruct(result.shape, jnp.float32)
        start = zeros_after((inputs.x, routes), sums)
        with known_trips(self.even_rounds, exact=False):
            out = lax.fori_loop(0, routes.rounds, one, start)
        return out.astype(inputs.x.dtype)

    def backward(
        self,
        perturbed: Inputs,
        inputs: Inputs,
        cotangent: Array,
        sums: Inputs,
        routes: _Routes,
    ) -> Inputs:
        def one(i: Array, sums: Inputs) -> Inputs:
            sent = self.sent(routes, i)
            own = inputs.at(sent.pair, inputs.weights)
            token = inputs.tokens(sent.pair)
            _, pullback = vjp_of_part(
                lambda own: self.results(own, routes, sent), own, perturbed
            )
            (new,) = pullback(self.given(rows_at(cotangent, token), sent))
            of_x: Any = None  # where tokens, or gates, are not differentiated
            of_gates = None
            if sums.x is not None:
                of_x = add_at(sums.x, token, new.x)
            if sums.gates is not None:
                of_gates = add_at(sums.gates, sent.pair, new.gates)
            of_weights = jax.tree.map(added, sums.weights, new.weights)
            return Inputs(of_x, of_gates, of_weights)

        with known_trips(self.even_rounds, exact=False):
            return lax.fori_loop(0, routes.rounds, one, sums)


_exchanged = perturbed_vjp(Exchange.forward, loop_gradients)
