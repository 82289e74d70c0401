"""What gradient dot products cost beside the plain gradient: FLOPs and memory compiled, time measured.

    python -m benchmarks.ghost memory --target h200
    python -m benchmarks.ghost time

`memory` compiles loss and gradients of Qwen3-30B-A3B with adapters (that of `benchmarks.qwen3_context`) for a
device that need not be attached, with `nested`, without and with the scores of every adapter's array, and
those of small decoders with `remat=True`, all weights trained or adapters alone.
`time` runs a step of a small decoder on this machine: plain, with scores, and `jax.vmap` of per-example
gradients, in turns. Each writes `results/ghost_<what>.json`.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from models.decoder.config import DecoderConfig, ExpertsConfig
from models.decoder.decoder import Decoder
from models.qwen3 import Qwen3Config, Qwen3MoeConfig
from models.run_config import LmRunConfig
from models.run_state import with_adapters
from stacked_remat import ScanCheckpointSpec, ghost, memory
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.ops import chunked_cross_entropy
from stacked_remat.training import BATCH_AXIS, POSITION_AXIS, TokenBatch, cast_parameters, parse_config

from .command import Rows, benchmark, one_of
from .qwen3_context import CONFIG, random_batch
from .record import memory_row, timed_in_turn

Vocab = Axis("vocab", 1024)


def token_means(model: Decoder, batch: TokenBatch) -> NamedArray:
    """The mean cross entropy of each example's tokens, without auxiliary losses."""
    hidden, _ = model.hidden_states(batch.tokens, documents=batch.documents, positions=batch.positions)
    head = model.unembedding()
    (Embed,) = (axis for axis in head.axes if axis != model.Vocab)
    losses = chunked_cross_entropy(hidden, head, batch.targets, Embed, model.Vocab, weights=batch.weights)
    return hax.mean(losses, POSITION_AXIS)


def _plain(model: Any, batch: TokenBatch, *, trainable: Any) -> Any:
    trained, frozen = eqx.partition(model, trainable)

    def loss(trained: Any) -> Any:
        return hax.mean(token_means(eqx.combine(trained, frozen), batch)).scalar()

    return eqx.filter_value_and_grad(loss)(trained)


def _scored(model: Any, batch: TokenBatch, direction: Any, *, trainable: Any) -> Any:
    return ghost.grad_dot(model, token_means, batch, direction=direction, trainable=trainable)


def _vmapped(model: Any, batch: TokenBatch, direction: Any, *, trainable: Any) -> Any:
    trained, frozen = eqx.partition(model, trainable)

    def of_one(tokens: Any, targets: Any, weights: Any) -> Any:
        one = jax.tree.map(lambda array: array[None], (tokens, targets, weights))
        axes = (Axis(BATCH_AXIS, 1), batch.tokens.resolve_axis(POSITION_AXIS))
        own = TokenBatch(*(NamedArray(array, axes) for array in one))
        return eqx.filter_grad(
            lambda trained: hax.mean(token_means(eqx.combine(trained, frozen), own)).scalar()
        )(trained)

    gradients = jax.vmap(of_one)(*(one.array for one in (batch.tokens, batch.targets, batch.weights)))
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(direction), strict=True)
    scores = sum(jnp.tensordot(each, along, along.ndim) for each, along in pairs)
    return jax.tree.map(lambda each: jnp.mean(each, 0), gradients), scores


@benchmark("ghost_memory_{target}")
def of_memory(target: str = "h200", tokens: int = 65_536, rows: tuple[int, ...] = (1, 8)) -> Rows:
    """What a step takes with and without scores; `rows` examples share the tokens."""
    for case, (model, trainable), batch in _cases(tokens, rows):
        arguments = {"plain": (model, batch), "scored": (model, batch, eqx.filter(model, trainable))}
        plain, scored = (
            memory.report(functools.partial(fn, trainable=trainable), *arguments[name], target=target)
            for name, fn in (("plain", _plain), ("scored", _scored))
        )
        yield {
            **case,
            "plain": memory_row(plain),
            "scored": memory_row(scored),
            "temporaries_ratio": scored.temporaries / plain.temporaries,
            "flops_ratio": scored.flops.matmul / plain.flops.matmul,
        }


def _cases(tokens: int, rows: tuple[int, ...]) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """What is compiled for memory: facts of the row, a model with what is trained of it, and a batch."""
    config = parse_config(LmRunConfig, ["--config_path", str(CONFIG)]).resolved(check_folder=False)

    def large() -> Any:
        key = jax.random.key(0)
        model = Decoder.init(config.model, config.Vocab, remat="nested", key=key)
        model = cast_parameters(model, config.trainer.precision.parameters)
        return with_adapters(model, config.lora, key=key)

    cases = [("Qwen3-30B-A3B", "adapters", large, count, tokens // count) for count in rows]
    cases += [(*named, functools.partial(small, *named), 8, 1024) for named in SMALL]
    for layers, trained, make, count, length in cases:
        facts = {"layers": layers, "trained": trained, "examples": count, "tokens": count * length}
        yield (
            facts,
            eqx.filter_eval_shape(make),
            eqx.filter_eval_shape(random_batch, count, length, Vocab.size),
        )


SMALL = tuple(itertools.product(("dense", "experts"), ("all", "adapters")))


def small(layers: str, trained: str, remat: ScanCheckpointSpec = True, hidden: int = 256) -> tuple[Any, Any]:
    """A small decoder, and which of its arrays are trained."""
    sizes: dict[str, Any] = {"hidden_dim": hidden, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
    config: DecoderConfig = Qwen3Config(**sizes)
    if layers == "experts":
        config = Qwen3MoeConfig(**sizes, experts=ExpertsConfig(8, 2, hidden))
    model = Decoder.init(config, Vocab, remat=remat, key=jax.random.key(0))
    if trained == "all":
        return model, jax.tree.map(lambda _: True, model)
    model = apply_lora(model, LoraConfig(rank=8, targets=("layers.*proj",)), key=jax.random.key(1))
    return model, lora_filter(model)


@benchmark("ghost_time")
def of_time(repeats: int = 5) -> Rows:
    """Runs of each, in turns; other work of the machine only adds time, so the fastest count."""
    model, trainable = small("dense", "all")
    batch = random_batch(16, 128, Vocab.size)
    direction = jax.tree.map(jnp.ones_like, eqx.filter(model, trainable))
    steps = {"plain": (_plain,), "scored": (_scored, direction), "vmap": (_vmapped, direction)}
    runs = {
        name: functools.partial(
            eqx.filter_jit(functools.partial(fn, trainable=trainable)), model, batch, *along
        )
        for name, (fn, *along) in steps.items()
    }
    timed_in_turn(runs, 1)  # which compiles
    for name, found in timed_in_turn(runs, repeats).items():
        yield {"step": name, "seconds": found}


main = one_of(memory=of_memory, time=of_time)


if __name__ == "__main__":
    main()
