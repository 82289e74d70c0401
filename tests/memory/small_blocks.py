"""Small layers of many kinds, for the planner: `block(weights, x) -> x`.

Each is a function of the weights of a layer, by name, and the carry. `WEIGHTS` has the
shapes of its weights.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stacked_remat import checkpoint, checkpoint_name

ROWS, WIDTH, INNER, EXPERTS = 128, 8, 24, 4
Square, Up, Down = (WIDTH, WIDTH), (WIDTH, INNER), (INNER, WIDTH)

BLOCKS: dict[str, Callable[[Any, Any], Any]] = {}
WEIGHTS: dict[str, dict[str, tuple[int, ...]]] = {}


def block(**weights: tuple[int, ...]) -> Callable[[Callable], Callable]:
    def register(fn: Callable) -> Callable:
        BLOCKS[fn.__name__] = fn
        WEIGHTS[fn.__name__] = weights
        return fn

    return register


def normed(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@block(up=Up, down=Down)
def mlp(w, x):
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


@block(up=Up, gate=Up, down=Down)
def gated_mlp(w, x):
    h = normed(x)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


@block(q=Square, k=Square, v=Square, o=Square)
def attention(w, x):
    scores = (x @ w["q"]) @ (x @ w["k"]).T
    return x + jax.nn.softmax(scores) @ (x @ w["v"]) @ w["o"]


@block(q=Square, k=Square, v=Square, o=Square)
def heads(w, x):
    q, k, v = (jnp.reshape(x @ w[name], (ROWS, 2, -1)) for name in "qkv")
    scores = jnp.einsum("qhd,khd->hqk", q, k)
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
    return x + mixed.reshape(ROWS, WIDTH) @ w["o"]


@block(q=Square, up=Up, down=Down)
def attention_and_mlp(w, x):
    q = normed(x) @ w["q"]
    x = x + jax.nn.softmax(q @ q.T) @ x
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


@block(router=(WIDTH, EXPERTS), up=(EXPERTS, *Up), down=(EXPERTS, *Down))
def experts(w, x):
    gates = jax.nn.softmax(x @ w["router"])
    inner = jax.nn.silu(jnp.einsum("td,edf->etf", x, w["up"]))
    return x + jnp.einsum("etf,efd,te->td", inner, w["down"], gates)


@block(router=(WIDTH, EXPERTS), up=(EXPERTS, *Up), down=(EXPERTS, *Down))
def chosen_expert(w, x):
    logits = x @ w["router"]
    chosen = jax.nn.one_hot(jnp.argmax(logits, axis=-1), EXPERTS, dtype=x.dtype)
    gates = chosen * jax.nn.sigmoid(logits)
    inner = jax.nn.relu(jnp.einsum("td,edf->etf", x, w["up"]))
    return x + jnp.einsum("te,etf,efd->td", gates, inner, w["down"])


@block(kernel=(3, WIDTH, INNER), back=(3, INNER, WIDTH))
def convolution(w, x):
    def convolved(x, kernel):
        dimensions = ("NHC", "HIO", "NHC")
        return lax.conv_general_dilated(
            x[None], kernel, (1,), "SAME", dimension_numbers=dimensions
        )[0]

    return x + convolved(jax.nn.gelu(convolved(x, w["kernel"])), w["back"])


@block(q=Square, k=Square, v=Square, decay=(WIDTH, 1))
def gated_delta(w, x):
    decays = jax.nn.sigmoid(x @ w["decay"])

    def step(state, token):
        q, k, v, decay = token
        state = decay[:, None] * state + jnp.outer(k, v - k @ state)
        return state, q @ state

    tokens = (x @ w["q"], normed(x @ w["k"]), x @ w["v"], decays)
    _, mixed = lax.scan(step, jnp.zeros(Square), tokens)
    return x + mixed


@block(up=Up, middle=(INNER, INNER), down=Down)
def chain(w, x):
    h = jnp.sin(x @ w["up"])
    h = jnp.sin(h @ w["middle"])
    h = jnp.sin(h @ w["middle"])
    return x + h @ w["down"]


@block(down=(WIDTH, 2), up=(2, WIDTH))
def bottleneck(w, x):
    return x + jnp.tanh(jnp.tanh(x @ w["down"]) @ w["up"])


@block(scale=(WIDTH,), shift=(WIDTH,))
def no_products(w, x):
    return x + jnp.sin(normed(x) * w["scale"][None]) + w["shift"][None]


@block(up=Up, down=Down)
def with_names(w, x):
    hidden = checkpoint_name(x @ w["up"], "hidden")
    return x + checkpoint_name(jax.nn.silu(hidden) @ w["down"], "output")


@block(up=Up, down=Down, out=Square)
def custom_rule(w, x):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(
        lambda x, w: (checkpoint_name(x @ w, "product"), (x, w)),
        lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct),
    )
    return x + jnp.sin(product(jnp.sin(x @ w["up"]), w["down"])) @ w["out"]


@block(up=Up, down=Down, out=Square)
def region(w, x):
    inner = checkpoint(lambda up, down, x: jnp.sin(x @ up) @ down)
    return x + jnp.sin(inner(w["up"], w["down"], x)) @ w["out"]


@block(a=Square, b=Square, c=Square)
def shared_product(w, x):
    h = jnp.sin(x @ w["a"])
    return x + jnp.sin(h @ w["b"]) * jnp.cos(h @ w["c"])


@block(up=Up, down=Down, first=(WIDTH, 2), second=(2, INNER))
def adapter(w, x):
    frozen = lax.stop_gradient(w["up"])
    h = x @ frozen + jnp.sin(x) @ w["first"] @ w["second"]
    return x + jax.nn.silu(h) @ lax.stop_gradient(w["down"])


@block(up=Up, down=Down)
def in_bfloat16(w, x):
    up, down = (w[name].astype(jnp.bfloat16) for name in ("up", "down"))
    h = jax.nn.silu(x.astype(jnp.bfloat16) @ up)
    return x + (h @ down).astype(x.dtype)


@block(up=Up, down=Down)
def within_jit(w, x):
    return x + jax.jit(lambda x: jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]))(x)


@block(q=Square, k=Square, up=(ROWS, INNER), down=(INNER, ROWS))
def mixer(w, x):
    tokens = x.T @ w["up"]
    x = x + (jax.nn.relu(tokens) @ w["down"]).T
    return x + jnp.sin(x @ w["q"]) @ w["k"]
