"""What gradient dot products cost beside the plain gradient: FLOPs and memory compiled, time measured.

    python -m benchmarks.ghost memory --target h200
    python -m benchmarks.ghost flops
    python -m benchmarks.ghost time

`memory` compiles loss and gradients of Qwen3-30B-A3B with adapters (that of `benchmarks.qwen3_context`) for a
device that need not be attached, with `nested`, without and with the scores of every adapter's array, and
those of small decoders with `remat=True`, all weights trained or adapters alone.
`flops` counts the products of the small decoders.
`time` runs a step of a small decoder on this machine: plain, with scores, and `jax.vmap` of per-example
gradients, in turns. Each writes `results/ghost_<what>.json`.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from models.decoder.config import DecoderConfig, ExpertsConfig
from models.lm import LanguageModel, build_model
from models.lora import with_adapters
from models.qwen3 import Qwen3Config, Qwen3MoeConfig
from models.run_config import LmRunConfig
from stacked_remat import ScanCheckpointSpec, ghost, memory
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.ops import chunked_cross_entropy
from stacked_remat.training import BATCH_AXIS, POSITION_AXIS, TokenBatch, cast_parameters, parse_config

from .qwen3_context import CONFIG
from .record import RESULTS, memory_row, timed_in_turn, write_results

Vocab = Axis("vocab", 1024)


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["memory", "flops", "time"])
    parser.add_argument("--target", default="h200", choices=list(memory.TARGETS))
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="examples that share the tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = {"memory": _memory, "flops": _flops, "time": _time}[options.what](options)
    name = f"memory_{options.target}" if options.what == "memory" else options.what
    path = options.out / f"ghost_{name}.json"
    write_results(path, rows=rows)
    print(f"wrote {path}")
    return path


def token_means(model: LanguageModel, batch: TokenBatch) -> NamedArray:
    """The mean cross entropy of each example's tokens, without auxiliary losses."""
    hidden, _ = model.hidden_states(batch.tokens, documents=batch.documents, positions=batch.positions)
    head = model.unembedding()
    (Embed,) = (axis for axis in head.axes if axis != model.Vocab)
    losses = chunked_cross_entropy(hidden, head, batch.targets, Embed, model.Vocab, weights=batch.weights)
    return hax.mean(losses, POSITION_AXIS)


def batch_of(rows: int, tokens: int) -> TokenBatch:
    """Tokens of no meaning."""
    axes = (Axis(BATCH_AXIS, rows), Axis(POSITION_AXIS, tokens))
    ids = hax.random.randint(jax.random.key(1), axes, 0, Vocab.size)
    return TokenBatch(ids, ids, hax.ones(axes, dtype=jnp.float32))


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


def _memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for case, (model, trainable), batch in _cases(options):
        direction = eqx.filter(model, trainable)
        plain = memory.report(
            functools.partial(_plain, trainable=trainable), model, batch, target=options.target
        )
        scored = memory.report(
            functools.partial(_scored, trainable=trainable), model, batch, direction, target=options.target
        )
        row: dict[str, Any] = case | {"plain": memory_row(plain), "scored": memory_row(scored)}
        row |= {"temporaries_ratio": scored.temporaries / plain.temporaries}
        row |= {"flops_ratio": scored.flops.matmul / plain.flops.matmul}
        found.append(row)
        print(
            f"{', '.join(map(str, case.values()))}: temporaries {plain.temporaries / 2**30:.2f} GiB, with "
            f"scores {scored.temporaries / 2**30:.2f} GiB ({row['temporaries_ratio']:.3f}); products "
            f"{row['flops_ratio']:.3f}",
            flush=True,
        )
    return found


def _cases(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """What is compiled for memory: facts of the row, a model with what is trained of it, and a batch."""
    config = parse_config(LmRunConfig, ["--config_path", str(CONFIG)]).resolved(check_folder=False)

    def large() -> Any:
        key = jax.random.key(0)
        model = build_model(config.model, config.Vocab, remat="nested", key=key)
        model = cast_parameters(model, config.trainer.precision.parameters)
        return with_adapters(model, config.lora, key=key)

    def case(layers: str, trained: str, make: Any, rows: int, tokens: int) -> Any:
        facts = {"layers": layers, "trained": trained, "examples": rows, "tokens": rows * tokens}
        return facts, eqx.filter_eval_shape(make), eqx.filter_eval_shape(batch_of, rows, tokens)

    for rows in options.rows:
        yield case("Qwen3-30B-A3B", "adapters", large, rows, options.tokens // rows)
    for kind, adapters in itertools.product(("dense", "experts"), (False, True)):
        trained = "adapters" if adapters else "all"
        yield case(kind, trained, functools.partial(small, kind, True, adapters), 8, 1024)


def small(kind: str, remat: ScanCheckpointSpec, adapters: bool, hidden: int = 256) -> tuple[Any, Any]:
    """A small decoder, and which of its arrays are trained."""
    sizes: dict[str, Any] = {"hidden_dim": hidden, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
    config: DecoderConfig = Qwen3Config(**sizes)
    if kind == "experts":
        config = Qwen3MoeConfig(**sizes, experts=ExpertsConfig(8, 2, hidden))
    model = build_model(config, Vocab, remat=remat, key=jax.random.key(0))
    if not adapters:
        return model, jax.tree.map(lambda _: True, model)
    model = apply_lora(model, LoraConfig(rank=8, targets=("layers.*proj",)), key=jax.random.key(1))
    return model, lora_filter(model)


def _flops(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for kind in ("dense", "experts"):
        for adapters in (False, True):
            model, trainable = eqx.filter_eval_shape(functools.partial(small, kind, True, adapters))
            batch = eqx.filter_eval_shape(batch_of, 4, 256)
            arguments = model, batch, eqx.filter(model, trainable)
            reports = [
                memory.count_flops(jax.make_jaxpr(functools.partial(fn, trainable=trainable))(*args))
                for fn, args in ((_plain, arguments[:2]), (_scored, arguments))
            ]
            plain, scored = (one.matmul for one in reports)
            trained = "adapters" if adapters else "all"
            found.append({"layers": kind, "trained": trained, "plain": plain, "scored": scored})
            print(f"{kind:8} {trained:9} products with scores / plain: {scored / plain:.3f}", flush=True)
    return found


def _time(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs of each, in turns; other work of the machine only adds time, so the fastest count."""
    model, trainable = small("dense", True, adapters=False)
    batch = batch_of(16, 128)
    direction = jax.tree.map(jnp.ones_like, eqx.filter(model, trainable))
    steps: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "plain": (eqx.filter_jit(functools.partial(_plain, trainable=trainable)), (model, batch)),
        "scored": (
            eqx.filter_jit(functools.partial(_scored, trainable=trainable)),
            (model, batch, direction),
        ),
        "vmap": (eqx.filter_jit(functools.partial(_vmapped, trainable=trainable)), (model, batch, direction)),
    }
    runs = {name: functools.partial(step, *args) for name, (step, args) in steps.items()}
    timed_in_turn(runs, 1)  # which compiles
    seconds = timed_in_turn(runs, options.repeats)
    rows = [{"step": name, "seconds": found} for name, found in seconds.items()]
    for name, found in seconds.items():
        print(f"{name:7} {min(found):.3f} s, {min(found) / min(seconds['plain']):.2f} of plain")
    return rows


if __name__ == "__main__":
    main()
