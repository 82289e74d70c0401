"""What gradient dot products cost beside the plain gradient, in FLOPs and memory.

    python -m benchmarks.ghost --target h200

Compiles loss and gradients of Qwen3-30B-A3B with adapters (that of
`benchmarks.qwen3_context`) for a device that need not be attached, with `nested`,
without and with the scores of every adapter's array, and those of small decoders with
`remat=True`, all weights trained or adapters alone.
"""

import functools
import itertools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from models.parts.config import DecoderConfig
from models.parts.decoder import Decoder
from models.parts.sections import ExpertsConfig
from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from models.run_config import LmRunConfig
from models.run_state import with_adapters
from stacked_remat import ghost, memory
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.training import (
    POSITION_AXIS,
    TokenBatch,
    cast_parameters,
    parse_config,
)

from .command import Rows, benchmark
from .qwen3_context import CONFIG, random_batch
from .record import memory_row

Vocab = Axis("vocab", 1024)


def token_means(model: Decoder, batch: TokenBatch) -> NamedArray:
    """The mean cross entropy of each example's tokens, without auxiliary losses."""
    hidden, _ = model.hidden_states(
        batch.tokens, documents=batch.documents, positions=batch.positions
    )
    losses = model.token_losses(hidden, batch.targets, weights=batch.weights)
    return hax.mean(losses, POSITION_AXIS)


def _plain(model: Any, batch: TokenBatch, *, trainable: Any) -> Any:
    trained, frozen = eqx.partition(model, trainable)

    def loss(trained: Any) -> Any:
        return hax.mean(token_means(eqx.combine(trained, frozen), batch)).scalar()

    return eqx.filter_value_and_grad(loss)(trained)


def _scored(model: Any, batch: TokenBatch, direction: Any, *, trainable: Any) -> Any:
    return ghost.grad_dot(
        model, token_means, batch, direction=direction, trainable=trainable
    )


SMALL = [
    (*named, 8, 1024)
    for named in itertools.product(("dense", "experts"), ("all", "adapters"))
]
SMALL.append(("experts", "all", 4, 2048))


@benchmark("ghost_memory_{target}")
def main(
    target: str = "h200", tokens: int = 65_536, examples: tuple[int, ...] = (1, 8)
) -> Rows:
    """What a step takes with and without scores; so many `examples` share the tokens of
    the large model.
    """
    cases = [
        ("Qwen3-30B-A3B", "adapters", large, count, tokens // count)
        for count in examples
    ]
    cases += [
        (of, trained, functools.partial(small, of, trained), *shape)
        for of, trained, *shape in SMALL
    ]
    for layers, trained, make, count, length in cases:
        model, trainable = eqx.filter_eval_shape(make)
        batch = eqx.filter_eval_shape(random_batch, count, length, Vocab.size)
        plain, scored = (
            memory.report(
                functools.partial(fn, trainable=trainable),
                model,
                batch,
                *along,
                target=target,
            )
            for fn, along in ((_plain, ()), (_scored, (eqx.filter(model, trainable),)))
        )
        yield {
            "layers": layers,
            "trained": trained,
            "examples": count,
            "tokens": count * length,
            "plain": memory_row(plain),
            "scored": memory_row(scored),
            "temporaries_ratio": scored.temporaries / plain.temporaries,
            "flops_ratio": scored.flops.matmul / plain.flops.matmul,
        }


def large() -> tuple[Any, Any]:
    """The model of the config with adapters, which alone are trained."""
    config = parse_config(LmRunConfig, ["--config_path", str(CONFIG)]).resolved(
        check_folder=False
    )
    key = jax.random.key(0)
    model = Decoder.init(config.model, config.Vocab, remat="nested", key=key)
    model = cast_parameters(model, config.trainer.precision.parameters)
    return with_adapters(model, config.lora, key=key)


def small(layers: str, trained: str) -> tuple[Any, Any]:
    """A small decoder, and which of its arrays are trained."""
    sizes: dict[str, Any] = {
        "hidden_dim": 256,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    config: DecoderConfig = Qwen3Config(**sizes)
    if layers == "experts":
        config = Qwen3MoeConfig(**sizes, experts=ExpertsConfig(8, 2, 256))
    model = Decoder.init(config, Vocab, remat=True, key=jax.random.key(0))
    if trained == "all":
        return model, jax.tree.map(lambda _: True, model)
    model = apply_lora(
        model, LoraConfig(rank=8, targets=("layers.*proj",)), key=jax.random.key(1)
    )
    return model, lora_filter(model)


if __name__ == "__main__":
    main()
