"""Parts of random layers: each draws its arrays and says what it does to the carry.

A layer applies its parts one after the other to rows `x` [row, column]. The function
that draws a part is called twice with equal random numbers: for the layer that this
library runs and for the reference.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import stacked_remat as sr
from stacked_remat import checkpoint_name as named

ROWS, COLUMNS = 4, 2
FLAG = {"sign": 1.0}  # what the part `flag` reads while it is traced


class Part(NamedTuple):
    """What a part of a layer computes.

    Attributes:
        step: `(x, weights, own, shared) -> (x, own)`, of one layer.
        weights: a tree with an array, with the layers in front, for each of the layers.
        own: the part's own leaves of the first carry.
        shared: a tree that all layers get whole.
    """

    step: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    weights: Any = None
    own: Any = None
    shared: Any = None


class Make(NamedTuple):
    """What a part is made from: random numbers, the dtype of `x`, and whether the
    library may be used.
    """

    rng: np.random.Generator
    dtype: Any
    layers: int
    reverse: bool
    is_ours: bool

    def array(self, *shape: int, dtype: Any = None) -> jax.Array:
        """A random array."""
        return jnp.asarray(
            self.rng.normal(size=shape) * 0.4, self.dtype if dtype is None else dtype
        )

    def per_layer(self, *shape: int, dtype: Any = None) -> jax.Array:
        """A random array with the layers in front."""
        return self.array(self.layers, *shape, dtype=dtype)

    def one_of(self, *values: Any) -> Any:
        """One of the values."""
        return values[self.rng.integers(len(values))]


PARTS: dict[str, Callable[[Make], Part]] = {}
NO_FORWARD_MODE = set[str]()  # parts with a rule for reverse mode alone
SPECIAL = set[str]()  # parts that only some programs can have


def part(draw: Callable[[Make], Part]) -> Callable[[Make], Part]:
    """Register a part."""
    PARTS[draw.__name__] = draw
    return draw


def without_forward_mode(draw: Callable[[Make], Part]) -> Callable[[Make], Part]:
    """Register a part that only has reverse mode."""
    NO_FORWARD_MODE.add(draw.__name__)
    return part(draw)


def special(draw: Callable[[Make], Part]) -> Callable[[Make], Part]:
    """Register a part of some programs."""
    SPECIAL.add(draw.__name__)
    return part(draw)


@part
def mlp(make: Make) -> Part:
    def step(x, weights, own, shared):
        hidden = named(jnp.tanh(x @ weights["up"]), "a")
        return x + named(hidden @ weights["down"], "b"), own

    return Part(
        step, {"up": make.per_layer(COLUMNS, 3), "down": make.per_layer(3, COLUMNS)}
    )


@part
def gate(make: Make) -> Part:
    def step(x, weights, own, shared):
        opened = jax.nn.sigmoid(x @ weights + shared[None])
        return x * named(opened, "a") + 0.1, own

    return Part(step, make.per_layer(COLUMNS, COLUMNS), None, make.array(COLUMNS))


@part
def attention(make: Make) -> Part:
    def step(x, weights, own, shared):
        scores = named((x @ weights["query"]) @ x.T, "a")
        return x + jax.nn.softmax(scores, -1) @ x * 0.5, own

    return Part(step, {"query": make.per_layer(COLUMNS, COLUMNS)})


@part
def convolution(make: Make) -> Part:
    def step(x, weights, own, shared):
        moved = lax.conv_general_dilated(x.T[None], weights, (1,), "SAME")
        return x + jnp.sin(moved[0].T), own

    return Part(step, make.per_layer(COLUMNS, COLUMNS, 3))


@part
def running_mean(make: Make) -> Part:
    def step(x, weights, own, shared):
        mean = own["mean"] * 0.9 + jnp.mean(x, 0) * weights
        return x + jnp.cumsum(x, 0) * 0.1 - mean[None], {"mean": mean}

    return Part(step, make.per_layer(COLUMNS), {"mean": make.array(COLUMNS)})


@part
def inner_scan(make: Make) -> Part:
    def step(x, weights, own, shared):
        def of_row(carry, row):
            carry = jnp.tanh(carry + row * weights)
            return carry, carry * row

        # Zeros that vary over devices as the rows do
        last, rows = lax.scan(of_row, 0 * x[0] * weights, x)
        return rows + last[None], own

    return Part(step, make.per_layer(COLUMNS))


@part
def inner_cond(make: Make) -> Part:
    branch = make.one_of("cond", "switch")

    def step(x, weights, own, shared):
        if branch == "cond":
            x = lax.cond(
                jnp.sum(x) > 0, lambda x: jnp.sin(x) + weights, lambda x: x * weights, x
            )
        else:
            branches = [jnp.cos, lambda x: x + weights, lambda x: x * 0.5]
            x = lax.switch(own % 3, branches, x)
        return x, own + 1

    return Part(step, make.per_layer(), jnp.int32(make.rng.integers(3)))


@part
def inner_fori(make: Make) -> Part:
    def step(x, weights, own, shared):
        return lax.fori_loop(
            0, 2, lambda i, x: jnp.sin(x + i.astype(x.dtype)) * weights, x
        ), own

    return Part(step, make.per_layer())


@part
def inner_while(make: Make) -> Part:
    def step(x, weights, own, shared):
        count = lax.while_loop(lambda n: n < 7, lambda n: n * 2 + 1, own)
        return x * jnp.cos(count.astype(x.dtype) + weights), count % 5

    return Part(step, make.per_layer(), jnp.int32(make.rng.integers(4)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled(factor, x):
    return jnp.sin(x) * factor


_scaled.defvjp(
    lambda factor, x: (jnp.sin(x) * factor, x),
    lambda factor, x, ct: (ct * jnp.cos(x) * 3,),
)


@without_forward_mode
def custom_vjp(make: Make) -> Part:
    def step(x, weights, own, shared):
        return x * 0.7 + _scaled(0.5, x * weights), own

    return Part(step, make.per_layer(COLUMNS)[:, None])


@jax.custom_vjp
def _other_value(x):
    return x * 0.5


_other_value.defvjp(lambda x: (x * 0.7, x), lambda x, ct: (ct * (0.6 + 0.1 * x),))


@without_forward_mode
def custom_vjp_with_another_value(make: Make) -> Part:
    def step(x, weights, own, shared):
        return _other_value(x) + jnp.sin(weights), own

    return Part(step, make.per_layer())


@without_forward_mode
def rule_with_closure(make: Make) -> Part:
    def step(x, weights, own, shared):
        @jax.custom_vjp
        def scaled(x):
            return x * 0.5

        scaled.defvjp(
            lambda x: (x * 0.5, jnp.cos(x) * shared.astype(x.dtype)),
            lambda kept, ct: (ct * kept,),
        )
        return scaled(x) + weights, own

    return Part(step, make.per_layer(), None, jnp.int32(3))


@jax.custom_jvp
def _leaky(x):
    return jnp.maximum(x, 0)


_leaky.defjvps(
    lambda tangent, result, x: jnp.where(x > 0, 1.0, 0.2).astype(x.dtype) * tangent
)


@part
def custom_jvp(make: Make) -> Part:
    def step(x, weights, own, shared):
        return _leaky(x @ weights) + x * 0.5, own

    return Part(step, make.per_layer(COLUMNS, COLUMNS))


@part
def complex_carry(make: Make) -> Part:
    real = jnp.float64 if make.dtype == jnp.float64 else jnp.float32

    def step(x, weights, own, shared):
        turned = own * lax.complex(jnp.cos(weights), jnp.sin(weights))
        turned = named(turned, "b") + jnp.sum(x).astype(turned.dtype) * 0.01
        return x + jnp.real(turned).astype(x.dtype)[None], turned

    first = lax.complex(
        make.array(COLUMNS, dtype=real), make.array(COLUMNS, dtype=real)
    )
    return Part(step, make.per_layer(COLUMNS, dtype=real), first)


@part
def complex_weights(make: Make) -> Part:
    real = jnp.float64 if make.dtype == jnp.float64 else jnp.float32

    def step(x, weights, own, shared):
        found = jnp.abs(x.astype(weights.dtype) * weights + 1) ** 2
        return x * 0.5 + jnp.tanh(found).astype(x.dtype), own

    parts = (make.per_layer(COLUMNS, dtype=real)[:, None] for _ in range(2))
    return Part(step, lax.complex(*parts))


@part
def integers(make: Make) -> Part:
    dtype = make.one_of(jnp.int32, jnp.int8, jnp.uint32)

    def step(x, weights, own, shared):
        count = own + weights
        row = x[(count % ROWS).astype(jnp.int32)]
        return x + jnp.sin(row)[None] * count.astype(x.dtype) * 0.1, count

    return Part(
        step,
        jnp.asarray(make.rng.integers(0, 3, make.layers), dtype),
        jnp.asarray(2, dtype),
    )


@part
def booleans(make: Make) -> Part:
    def step(x, weights, own, shared):
        return jnp.where(own & weights, x * 0.5, jnp.cos(x)), own ^ weights

    return Part(
        step,
        jnp.asarray(make.rng.integers(0, 2, (make.layers, COLUMNS)), bool),
        jnp.array([True, False]),
    )


@part
def key_in_carry(make: Make) -> Part:
    def step(x, weights, own, shared):
        own, use = jax.random.split(own)
        return x + jax.random.normal(use, x.shape, x.dtype) * 0.1 * weights, own

    return Part(step, make.per_layer(), jax.random.key(make.rng.integers(100)))


@part
def key_of_layer(make: Make) -> Part:
    is_typed = make.one_of(True, False)
    new_key = jax.random.key if is_typed else jax.random.PRNGKey

    def step(x, weights, own, shared):
        kept = jax.random.bernoulli(weights, 0.7, x.shape)
        return jnp.where(kept, x * 1.2, 0).astype(x.dtype), own

    return Part(step, jax.random.split(new_key(make.rng.integers(100)), make.layers))


@part
def buffer(make: Make) -> Part:
    def step(x, weights, own, shared):
        kept = own["kept"].at[own["row"]].set(jnp.sum(x, 0) * weights)
        return jnp.sin(x), {"kept": kept, "row": own["row"] + 1}

    return Part(
        step,
        make.per_layer(),
        {"kept": make.array(make.layers + 1, COLUMNS), "row": jnp.int32(0)},
    )


@part
def buffer_that_is_read(make: Make) -> Part:
    rows = max(1, make.layers)

    def step(x, weights, own, shared):
        before = own["kept"][(own["row"] - 1) % rows]
        kept = lax.dynamic_update_index_in_dim(own["kept"], x[0], own["row"], 0)
        return jnp.sin(x) + before[None] * weights, {
            "kept": kept,
            "row": own["row"] + 1,
        }

    return Part(
        step, make.per_layer(), {"kept": make.array(rows, COLUMNS), "row": jnp.int32(0)}
    )


@part
def weak_types(make: Make) -> Part:
    def step(x, weights, own, shared):
        return x * own, jnp.sin(own)

    number = 0.5 + make.rng.random()
    return Part(step, make.per_layer(), make.one_of(number, jnp.asarray(number)))


@part
def mixed_dtypes(make: Make) -> Part:
    other = (
        jnp.float32
        if make.dtype == jnp.float64
        else make.one_of(jnp.float32, jnp.float16)
    )

    def step(x, weights, own, shared):
        own = own * jnp.cos(jnp.sum(weights)).astype(other)
        return x + weights.astype(x.dtype) * 0.5 + jnp.sum(own).astype(x.dtype), own

    return Part(
        step, make.per_layer(COLUMNS, dtype=other)[:, None], make.array(3, dtype=other)
    )


@part
def empty(make: Make) -> Part:
    def step(x, weights, own, shared):
        return x + jnp.sum(weights) + jnp.sum(own), own * 2

    return Part(step, make.per_layer(0), make.array(2, 0), make.array(0, 3))


@part
def absent(make: Make) -> Part:
    def step(x, weights, own, shared):
        assert (
            weights["none"] is None and own["none"] is None and shared["none"] is None
        )
        return x * weights["scale"] * shared["number"] + (
            0.1 if shared["text"] == "sum" else 0.0
        ), own

    weights = {"none": None, "scale": make.per_layer()}
    return Part(
        step, weights, {"none": None}, {"none": None, "text": "sum", "number": 0.9}
    )


@part
def unused(make: Make) -> Part:
    def step(x, weights, own, shared):
        return x + 0.1, {"first": own["second"], "second": own["first"]}

    own = {"first": make.array(2), "second": make.array(2)}
    return Part(
        step,
        {"float": make.per_layer(2), "int": jnp.arange(make.layers)},
        own,
        make.array(3),
    )


@part
def replaced_carry(make: Make) -> Part:
    def step(x, weights, own, shared):
        return jnp.broadcast_to(jnp.sin(weights), x.shape) + lax.stop_gradient(
            x
        ) * 0.1, own

    return Part(step, make.per_layer(COLUMNS))


@part
def checkpoint_inside(make: Make) -> Part:
    save = make.one_of(False, ["a"], True, jax.checkpoint_policies.dots_saveable)

    def step(x, weights, own, shared):
        def region(x, weights):
            return jnp.tanh(named(x @ weights, "a")) + named(x, "b") * jnp.sum(shared)

        run = (
            sr.checkpoint(region, save=save) if make.is_ours else jax.checkpoint(region)
        )
        return run(x, weights), own

    return Part(step, make.per_layer(COLUMNS, COLUMNS), None, make.array(2))


@part
def tiled_inside(make: Make) -> Part:
    tiles = int(make.rng.integers(1, ROWS + 1))
    is_sum = make.one_of(False, True)

    def step(x, weights, own, shared):
        def of_rows(x):
            hidden = jnp.tanh(x @ weights)
            return jnp.sum(hidden, 0) if is_sum else hidden

        options = {"reduce": "sum"} if is_sum else {}
        run = sr.tiled(of_rows, 0, tiles=tiles, **options) if make.is_ours else of_rows
        found = run(x)
        return x * 0.5 + (found[None] if is_sum else found), own

    return Part(step, make.per_layer(COLUMNS, COLUMNS))


@part
def fold_inside(make: Make) -> Part:
    remat = make.one_of(
        False, True, "nested", "recompute", sr.ScanCheckpointPolicy(max_carries=2)
    )

    def step(x, weights, own, shared):
        def inner(x, scale):
            return jnp.sin(x * scale[None]) + jnp.sum(shared)

        if make.is_ours:
            return sr.fold(inner, 3, remat=remat)(x, weights), own
        return functools.reduce(inner, weights, x), own

    return Part(step, make.per_layer(3, COLUMNS), None, make.array(2))


@part
def gathers(make: Make) -> Part:
    def step(x, weights, own, shared):
        order = jnp.argsort(x[:, 0])
        taken = jnp.take_along_axis(x, order[:, None], 0)
        return taken.at[weights].add(0.1 * x[:2]) + jnp.max(x, 0)[None] * 0.1, own

    return Part(
        step, jnp.asarray(make.rng.integers(0, ROWS, (make.layers, 2)), jnp.int32)
    )


@part
def linear_algebra(make: Make) -> Part:
    def step(x, weights, own, shared):
        matrix = jnp.eye(COLUMNS, dtype=weights.dtype) * 2 + weights @ weights.T
        found = jnp.linalg.solve(matrix, x.astype(weights.dtype).T).T
        return found.astype(x.dtype), own

    return Part(
        step,
        make.per_layer(
            COLUMNS,
            COLUMNS,
            dtype=jnp.float64 if make.dtype == jnp.float64 else jnp.float32,
        ),
    )


@part
def inner_jit(make: Make) -> Part:
    constant = np.asarray(make.array(COLUMNS))

    def step(x, weights, own, shared):
        @functools.partial(jax.jit, static_argnames="power")
        def compiled(x, power):
            return jnp.tanh(x * weights + constant[None]) ** power + shared

        return compiled(x, power=2), own

    return Part(step, make.per_layer(COLUMNS)[:, None], None, make.array())


@part
def effects(make: Make) -> Part:
    def step(x, weights, own, shared):
        jax.debug.callback(lambda _: None, jnp.sum(x))
        return x * weights, own

    return Part(step, make.per_layer())


@special
def flag(make: Make) -> Part:
    def step(x, weights, own, shared):
        return jnp.sin(x * FLAG["sign"] + weights), own

    return Part(step, make.per_layer())


@special
def edge(make: Make) -> Part:
    """It has no derivative in steps after the last, whose number is in the carry."""

    def step(x, weights, own, shared):
        left = own["last"].astype(x.dtype) + 0.5 - weights
        return x + jnp.sqrt(left) * 0.1, {
            "last": own["last"],
            "count": own["count"] + 1,
        }

    own = {"last": jnp.int32(make.rng.integers(make.layers + 1)), "count": jnp.int32(0)}
    steps = jnp.arange(make.layers, dtype=make.dtype)
    return Part(step, steps[::-1] if make.reverse else steps, own)
