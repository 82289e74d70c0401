"""Loops over the rows of grouped experts: the rules of their derivatives, and the loop
over chunks of tokens.

A chunk gathers the rows of its (token, expert) pairs, the first expert's first, applies
the expert to all of them with linear maps that are grouped products, and gathers the
results of each token's pairs for its sum. Choices out of range come last and are of no
expert: nothing takes what is computed for their rows.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .. import checkpoint_name
from .._memory_spaces import has_host_arrays
from .._sweep.store import zeros_after
from ._grouped_linear import GroupedLinear, Groups, Kernels
from ._padding import multiple_above, pad_axis
from ._perturbed_vjp import perturbed_vjp, vjp_of_part
from ._unrounded import unrounded
from .per_device import free_axis_mapping

_CHUNK_BYTES = 2**27  # of its widest rows, which it has several times

Expert: TypeAlias = Callable[..., Float[Array, "row embed"]]
"""(weights of one expert, rows, gates of the rows, perhaps what is saved) to rows times
their gates.
"""
Saved: TypeAlias = Callable[[Any, Float[Array, "row embed"]], Any]
"""(weights of one expert, rows) to arrays `[row, ...]`."""


class Inputs(NamedTuple):
    """What is differentiated: of all tokens, or of the rows of an iteration."""

    x: Array
    gates: Any
    weights: tuple[Any, ...]

    def tokens(self, pair: Array) -> Array:
        return pair // jax.tree.leaves(self.gates)[0].shape[1]

    def at(self, pair: Array, weights: tuple[Any, ...]) -> "Inputs":
        """The inputs of some (token, choice), beside some weights."""
        of_gates = jax.tree.map(
            lambda leaf: rows_at(leaf.reshape(-1), pair), self.gates
        )
        return Inputs(rows_at(self.x, self.tokens(pair)), of_gates, weights)

    def part(self, perturbed: "Inputs") -> "Inputs":
        """What is differentiated, None for the rest."""
        return jax.tree.map(lambda is_, own: own if is_ else None, perturbed, self)


@dataclass(frozen=True, eq=False)  # hashed by identity: an expert need not be hashable
class ExpertLoop(ABC):
    """A loop over the rows of all experts, on raw arrays."""

    expert: Expert
    saved: Saved | None
    rebuild: Callable[[Any], Any]  # makes the tree of weights that these take

    @abstractmethod
    def call(
        self, fn: Callable[..., Any], at: Any, weights: tuple[Array, ...], *rows: Any
    ) -> Any:
        """`fn(weights of their expert, *rows)` for the rows of one iteration, whose
        plan is `at`.
        """

    @abstractmethod
    def forward(self, inputs: Inputs, plan: Any) -> tuple[Array, Any]:
        """The sums of all tokens; also what is saved."""

    @abstractmethod
    def backward(
        self,
        perturbed: Inputs,
        inputs: Inputs,
        ct: Array,
        sums: Inputs,
        plan: Any,
        kept: Any,
    ) -> Inputs:
        """See `loop_gradients`."""

    def keep(self, own: Inputs, at: Any) -> Any:
        """What is saved of the rows of one iteration; None where nothing is."""
        if self.saved is None:
            return None
        return self.call(self.saved, at, own.weights, own.x)

    def apply(self, own: Inputs, kept: Any, at: Any) -> Array:
        """The experts' results for the rows of one iteration; `kept` comes from
        `keep`.
        """
        more = () if self.saved is None else (kept,)
        found = self.call(self.expert, at, own.weights, own.x, own.gates, *more)
        if jnp.shape(found)[:-1] != own.x.shape[:-1]:
            raise ValueError(
                "expert must return an array with a row of results for each row it is"
                " given."
            )
        return found

    def gradients(
        self, perturbed: Inputs, own: Inputs, kept: Any, at: Any, ct: Array
    ) -> Inputs:
        """The cotangents of the perturbed inputs of one iteration, from that of its
        rows.

        Those of weights, which are added to those of other iterations, are in float32.
        """
        all_kept = jax.tree.map(lambda _: True, kept)

        def applied(both: tuple[Inputs, Any]) -> Array:
            own, kept = both
            return self.apply(own, kept, at)

        wanted = perturbed, all_kept
        result, pullback = vjp_of_part(applied, (own, kept), wanted)
        ct = ct.astype(result.dtype)
        ((found, of_kept),) = unrounded(pullback, ct, _are_of_weights)
        if self.saved is not None:
            # The pullback of a linear map does not read its result, so this recomputes
            # nothing.
            _, pullback = vjp_of_part(lambda own: self.keep(own, at), own, perturbed)
            (more,) = unrounded(pullback, of_kept, _are_of_weights)
            found = jax.tree.map(jnp.add, found, more)
        return found


def _are_of_weights(found: Any) -> Any:
    """What a pullback of inputs finds, with True for the cotangents of weights."""
    nothing = jax.tree.map(lambda _: False, found)

    def mark(node: Any) -> Any:
        if not isinstance(node, Inputs):
            return node
        return node._replace(weights=jax.tree.map(lambda _: True, node.weights))

    return jax.tree.map(mark, nothing, is_leaf=lambda node: isinstance(node, Inputs))


def sorted_pairs(
    choices: Int[Array, "token choice"], experts: int
) -> tuple[Array, Array, Array]:
    """The expert of each (token, choice), `experts` if out of range; their order by it;
    how many each has.
    """
    flat = choices.reshape(-1).astype(jnp.int32)
    is_outside = (flat < 0) | (flat >= experts)
    flat = jnp.where(is_outside, experts, flat)
    zeros = jnp.zeros(experts, jnp.int32)
    counts = zeros.at[flat].add(1, mode="drop")
    # Stable, so that an expert's rows are in the order of their tokens
    order = jnp.argsort(flat, stable=True)
    return flat, order.astype(jnp.int32), counts


def masked(rows: Array, real: Array) -> Array:
    """The rows, `[*real.shape, ...]`, with zeros where they are not real."""
    within = jnp.expand_dims(real, tuple(range(real.ndim, rows.ndim)))
    return jnp.where(within, rows, jnp.zeros((), rows.dtype))


def add_at(sums: Array, index: Array, rows: Array) -> Array:
    """Sums in float32 with rows added to them; those with an index beyond all are
    dropped.
    """
    return sums.at[index].add(rows.astype(jnp.float32), mode="drop")


def added(sums: Array, some: Array) -> Array:
    return sums + some.astype(jnp.float32)


def rows_at(x: Array, index: Array) -> Array:
    """The rows at indices that are all in range: otherwise XLA for CPUs compares and
    selects.
    """
    return x.at[index].get(mode="promise_in_bounds")


def _run(loop: ExpertLoop, inputs: Inputs, constants: Any) -> Array:
    plan, read = constants
    # No backward pass follows, so nothing is saved.
    loop = replace(loop, saved=None)
    out, _ = loop.forward(inputs._replace(weights=read), plan)
    return out


def _forward(loop: ExpertLoop, inputs: Inputs, constants: Any) -> tuple[Array, Any]:
    plan, read = constants
    inputs = inputs._replace(weights=read)
    out, kept = loop.forward(inputs, plan)
    named = checkpoint_name((plan, kept), "expert_internals")
    return out, (inputs, *named)


def loop_gradients(
    loop: Any, wanted: tuple[bool, ...], residuals: Any, cotangent: Array
) -> Inputs:
    """The rule of the derivative of a loop: of an `ExpertLoop`, or of another with a
    method `backward`.

    That gets zeros in float32, of gates `[pair]`, and returns them with all gradients
    added.
    """
    inputs, *kept = residuals
    # Weights that are read in a stack have several leaves, of which `wanted` has one.
    single = inputs._replace(weights=(0,) * len(inputs.weights))
    tree = jax.tree.structure(single)
    perturbed: Inputs = jax.tree.unflatten(tree, wanted)
    if has_host_arrays(inputs.part(perturbed).weights):
        raise ValueError(
            "grouped_experts has no gradient of weights in host memory. Move them to"
            " the device first: jax.device_put(weights, jax.memory.Space.Device), or"
            " freeze them: jax.lax.stop_gradient(weights)."
        )

    def summed(is_: bool, own: Any) -> Any:
        return jax.ShapeDtypeStruct(own.shape, jnp.float32) if is_ else None

    def like(is_: bool, own: Any, found: Any) -> Any:
        if not is_:
            return None
        return found.reshape(own.shape).astype(own.dtype)

    # Loops add the gradient of a gate at the number of its pair.
    gates = jax.tree.map(lambda leaf: leaf.reshape(-1), inputs.gates)
    flat = inputs._replace(gates=gates)
    shapes = jax.tree.map(summed, perturbed, flat)
    sums = zeros_after((inputs.x, kept[0], cotangent), shapes)
    found = loop.backward(perturbed, inputs, cotangent, sums, *kept)
    return jax.tree.map(like, perturbed, inputs, found)


apply_experts = perturbed_vjp(_run, loop_gradients, _forward)
"""(loop, inputs, (plan, weights as they are read)) to the sums of all tokens.

The backward pass computes the rows again. The weights of `inputs` only get the
gradients: where they are others than those that are read, XLA does not compute them.
"""


def chunk_plan(
    choices: Int[Array, "token choice"],
    experts: int,
    rows_of: int,
    x: Array,
    weights: Sequence[Array],
) -> Groups:
    """The plan in chunks of tokens, by the widest rows: tokens, or what a matrix makes
    of them.

    The rows of a chunk come in multiples of `rows_of`.
    """
    widest = x.shape[1]
    for array in weights:
        if array.ndim > 2:  # else it is a vector of each expert
            widest = max(widest, *array.shape[1:])
    row_bytes = widest * x.dtype.itemsize
    chunks = max(1, -(-choices.size * row_bytes // _CHUNK_BYTES))
    # Tokens of padding choose no expert.
    cut = _cut(choices.astype(jnp.int32), chunks, fill=-1)
    sort = functools.partial(sorted_pairs, experts=experts)
    expert, order, sizes = jax.vmap(sort)(cut)
    # Rows of padding are of no expert, and come last.
    rows = multiple_above(order.shape[1], rows_of)
    expert = jnp.take_along_axis(expert, order, axis=1)
    expert = pad_axis(expert, 1, rows, fill=experts)
    # The inverse of the order: where each pair's row is
    row = jnp.argsort(order, axis=1).astype(jnp.int32)
    return Groups(pad_axis(order, 1, rows), row.reshape(cut.shape), expert, sizes)


@dataclass(frozen=True, eq=False)
class ChunkLoop(ExpertLoop):
    """The loop over chunks of tokens; experts take the rows and the weights of all
    experts, and `linear`.
    """

    kernels: Kernels
    experts: str  # the name of their axis

    def call(
        self, fn: Callable[..., Any], at: Groups, weights: tuple[Array, ...], *rows: Any
    ) -> Any:
        linear = GroupedLinear(self.kernels, at, self.experts)
        with free_axis_mapping():
            expert = self.rebuild(weights)
            return fn(expert, *rows, linear=linear)

    def forward(self, inputs: Inputs, plan: Groups) -> tuple[Array, Any]:
        def chunk(_: None, part: Any) -> tuple[None, Any]:
            (x, gates), at = part
            own = _rows(Inputs(x, gates, inputs.weights), at)
            kept = self.keep(own, at)
            rows = self.apply(own, kept, at)
            sums = _sums(rows, at)
            return None, (sums.astype(x.dtype), kept)

        parts = _cut_all((inputs.x, inputs.gates), plan)
        _, (out, kept) = lax.scan(chunk, None, (parts, plan))
        return _joined(out, inputs.x.shape[0]), kept

    def backward(
        self,
        perturbed: Inputs,
        inputs: Inputs,
        ct: Array,
        sums: Inputs,
        plan: Groups,
        kept: Any,
    ) -> Inputs:
        def chunk(of_weights: Any, part: Any) -> tuple[Any, Any]:
            (x, gates, ct), kept, at = part
            own = _rows(Inputs(x, gates, inputs.weights), at)
            # Every choice of a token has its cotangent: the result is their sum.
            own_ct = _taken(ct, _tokens(at), at)
            new = self.gradients(perturbed, own, kept, at, own_ct)
            of_x = None if new.x is None else _sums(new.x, at)
            of_gates = jax.tree.map(lambda rows: _pairs(rows, at), new.gates)
            of_weights = jax.tree.map(added, of_weights, new.weights)
            return of_weights, (of_x, of_gates)

        parts = _cut_all((inputs.x, inputs.gates, ct), plan)
        of_weights, of_rows = lax.scan(chunk, sums.weights, (parts, kept, plan))
        tokens = len(inputs.x)
        of_x, of_gates = jax.tree.map(lambda leaf: _joined(leaf, tokens), of_rows)
        return Inputs(of_x, of_gates, of_weights)


def _rows(inputs: Inputs, at: Groups) -> Inputs:
    """What each row has of the inputs."""

    def of_pairs(gates: Array) -> Array:
        return _taken(gates.reshape(-1), at.pair, at)

    x = _taken(inputs.x, _tokens(at), at)
    return inputs._replace(x=x, gates=jax.tree.map(of_pairs, inputs.gates))


def _tokens(at: Groups) -> Array:
    """The token of each row."""
    _, choices = at.row.shape
    return at.pair // choices


def _taken(x: Array, index: Array, at: Groups) -> Array:
    """What each row has of `x`, zero for those that are not real."""
    own = jnp.where(at.real, index, len(x))
    return jnp.take(x, own, axis=0, mode="fill", fill_value=0)


def _pairs(rows: Array, at: Groups) -> Array:
    """The rows of each token's choices, `[token, choice, ...]`, zero for those that are
    not real.
    """
    is_real = jnp.take(at.real, at.row, mode="clip")
    row = jnp.where(is_real, at.row, len(rows))  # out of range, which is filled
    return jnp.take(rows, row, axis=0, mode="fill", fill_value=0)


def _sums(rows: Array, at: Groups) -> Array:
    """The sum of the rows of each token, computed in float32."""
    pairs = _pairs(rows, at)
    wide = jnp.sum(pairs, axis=1, dtype=jnp.float32)
    return wide.astype(rows.dtype)


def _cut(x: Array, chunks: int, fill: int = 0) -> Array:
    """`[token, ...]` as `[chunk, token, ...]`, padded where it does not divide."""
    size = -(-x.shape[0] // chunks)
    padded = pad_axis(x, 0, chunks * size, fill)
    return padded.reshape(chunks, size, *x.shape[1:])


def _cut_all(arrays: Any, plan: Groups) -> Any:
    chunks = plan.row.shape[0]
    return jax.tree.map(lambda leaf: _cut(leaf, chunks), arrays)


def _joined(x: Array, count: int) -> Array:
    whole = x.reshape(-1, *x.shape[2:])
    return whole[:count]
