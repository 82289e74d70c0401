"""Memory and FLOPs of a chain of layers that are not stacked, by where it is
checkpointed.

Everything is compiled for a device that need not be attached, and nothing is run:

    python -m benchmarks.checkpoint_chain --target h200

`--only` is a regular expression that names match. Writes
`results/checkpoint_chain_<target>.json`. Matrix products are those of the compiled
program, so those that XLA merged count once; all have the same FLOPs.
"""

import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from stacked_remat import (
    BlockSeq,
    ScanCheckpointPolicy,
    ScanCheckpointSpec,
    checkpoint,
    checkpoint_name,
    memory,
)

from .command import Rows, benchmark
from .residual_mlp import Sizes

Layer = Callable[[jax.Array], jax.Array]
Run = Callable[[Sequence[Layer], jax.Array], jax.Array]


CHAIN = Sizes(layers=36, inner=8_192)


@benchmark("checkpoint_chain_{target}")
def main(sizes: Sizes = CHAIN, target: str = "local", only: str = "") -> Rows:
    for name, run in variants(sizes.layers):
        if re.search(only, name):
            yield {"name": name, **measure(run, sizes, target)}


def variants(layers: int) -> Iterator[tuple[str, Run]]:
    """Ways to run a chain, the one that checkpoints nothing first."""
    root = math.isqrt(layers)
    yield "nothing", _in_turn
    yield "jax.checkpoint(layer)", functools.partial(_each, jax.checkpoint)
    yield "checkpoint(layer)", functools.partial(_each, checkpoint)
    yield f"checkpoint({root} layers)", functools.partial(_segments, root)
    cut = ScanCheckpointPolicy(nested=layers // root)
    few = ScanCheckpointPolicy(max_carries=5)
    yield f"BlockSeq, nested={cut.nested}", functools.partial(_block_seq, cut)
    yield "BlockSeq, nested", functools.partial(_block_seq, "nested")
    yield "BlockSeq, max_carries=5", functools.partial(_block_seq, few)
    yield (
        "checkpoint(layer, offload=[its input])",
        functools.partial(_each, _with_input_on_host),
    )
    dots = functools.partial(checkpoint, save=jax.checkpoint_policies.dots_saveable)
    yield "checkpoint(layer, save=dots_saveable)", functools.partial(_each, dots)


def measure(run: Run, sizes: Sizes, target: str) -> dict[str, Any]:
    """Temporaries in bytes and in carries, matrix products of the gradient, and seconds
    of compilation.
    """

    def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return x + jax.nn.silu(x @ up) @ down

    def loss(x: jax.Array, weights: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
        layers = [functools.partial(layer, up=up, down=down) for up, down in weights]
        return jnp.sum(run(layers, x).astype(jnp.float32) ** 2)

    sharding = SingleDeviceSharding(memory.find_target(target).devices()[0])
    shape = functools.partial(
        jax.ShapeDtypeStruct, dtype=sizes.dtype, sharding=sharding
    )
    weights = [
        (shape((sizes.width, sizes.inner)), shape((sizes.inner, sizes.width)))
    ] * sizes.layers
    x = shape((sizes.tokens, sizes.width))
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(x, weights)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    found = compiled.memory_analysis()
    text = compiled.as_text()
    assert found is not None and text is not None
    return {
        "temporaries": found.temp_size_in_bytes,
        "host_temporaries": found.host_temp_size_in_bytes,
        "carries": round(found.temp_size_in_bytes / (x.size * x.dtype.itemsize), 2),
        "products": len(_PRODUCT.findall(text)),
        "compile_seconds": round(seconds, 1),
    }


# In fusions too, whose computations are in the text; some are calls of a library, and
# on TPUs convolutions.
_PRODUCT = re.compile(
    r" (?:dot|convolution)\("
    r"|custom_call_target=\"(?:__cublas|__onednn)[^\"]*(?:matmul|gemm)"
)


def _in_turn(layers: Sequence[Layer], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = layer(x)
    return x


def _each(
    around: Callable[[Layer], Layer], layers: Sequence[Layer], x: jax.Array
) -> jax.Array:
    return _in_turn([around(layer) for layer in layers], x)


def _block_seq(
    remat: ScanCheckpointSpec, layers: Sequence[Layer], x: jax.Array
) -> jax.Array:
    return BlockSeq.of(layers, remat=remat).fold(x)


def _with_input_on_host(layer: Layer) -> Layer:
    return checkpoint(lambda x: layer(checkpoint_name(x, "input")), offload=["input"])


def _segments(length: int, layers: Sequence[Layer], x: jax.Array) -> jax.Array:
    segments = [
        layers[start : start + length] for start in range(0, len(layers), length)
    ]
    return _in_turn(
        [checkpoint(functools.partial(_in_turn, segment)) for segment in segments], x
    )


if __name__ == "__main__":
    main()
