"""One training step on the CPU beside PyTorch and transformers, on the same weights.

    python -m benchmarks.cpu_step
    taskset -c 1 python -m benchmarks.cpu_step --processor_time

The second runs on one core and counts the time that the process had it: where others
use the machine too. Needs `tests/parity_requirements.txt` (`make parity` makes such an
environment). Losses and gradients are compared first. Then ours and theirs run in turn
in one process, so that a slow machine slows both. A ratio is the median over rounds of
our time divided by theirs. Writes `results/cpu_step.json`.
"""

import dataclasses
import importlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from models.lm import next_token_loss
from models.run_config import find_model
from models.run_state import Placement
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    AdamWConfig,
    ConstantSchedule,
    TokenBatch,
    TrainState,
    TrainStep,
    build_optimizer,
    remat_policy,
)

from .command import Rows, benchmark
from .record import check_close, timed

# Neither is needed by anything else, and lint runs without them.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

LEARNING_RATE = 1e-4

REMATS = ("products_saved", False, True)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is trained."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    experts: int = 16
    chosen: int = 4
    inner: int = 256
    vocab: int = 1_024
    batch: int = 2
    positions: int = 512


SIZES = Sizes()


class Pair(NamedTuple):
    """Ours and theirs, which compute the same and give numbers to compare, and the
    policy of our layers.
    """

    name: str
    remat: str
    ours: Callable[[], list[Any]]
    theirs: Callable[[], list[Any]]


@benchmark("cpu_step")
def main(sizes: Sizes = SIZES, rounds: int = 15, processor_time: bool = False) -> Rows:
    """Medians of times, of their ratios, and of the pages of memory taken from the
    operating system.

    Raises:
        ArithmeticError: losses, gradients or results differ.
    """
    pairs = [
        step(sizes, experts, remat) for experts in (True, False) for remat in REMATS
    ]
    for pair in pairs:
        # Compiles
        check_close(f"{pair.name}: ours and theirs", pair.ours(), pair.theirs(), 1e-3)
    clock = time.process_time if processor_time else time.perf_counter
    found = [
        [[_measured(run, clock) for run in (one.ours, one.theirs)] for one in pairs]
        for _ in range(rounds)
    ]
    for pair, own in zip(pairs, np.swapaxes(found, 0, 1), strict=True):
        (ours, our_faults), (theirs, their_faults) = np.moveaxis(own, 0, -1)
        low, middle, high = (
            np.quantile(ours / theirs, (0.25, 0.5, 0.75)).round(3).tolist()
        )
        yield {
            "name": pair.name,
            "remat": pair.remat,
            "median_seconds": round(statistics.median(ours), 5),
            "their_median_seconds": round(statistics.median(theirs), 5),
            "ratio": middle,
            "ratio_quartiles": f"{low:.2f} to {high:.2f}",
            "ratio_of_least": round(min(ours) / min(theirs), 3),
            "page_faults": int(statistics.median(our_faults)),
            "their_page_faults": int(statistics.median(their_faults)),
        }


def _measured(run: Callable[[], Any], clock: Callable[[], float]) -> tuple[float, int]:
    had = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return timed(run, clock), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - had


def step(sizes: Sizes, experts: bool, remat: str | bool) -> Pair:
    """Loss, gradients and AdamW of a Qwen3 model of random weights; theirs recomputes
    layers for `True`.
    """
    model = their_model(sizes, experts)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = find_model(folder)
        policy = remat_policy(remat, found.config.remat_presets)
        decoder = Placement.of(None, remat=policy).load_model(found, "float32")
    tokens = np.random.default_rng(0).integers(
        0, sizes.vocab, (sizes.batch, sizes.positions)
    )
    name = f"step, {sizes.experts} experts" if experts else "step, dense"
    theirs = their_step(model, torch.tensor(tokens), recomputed=remat is True)
    return Pair(name, str(remat), our_step(decoder, tokens), theirs)


def their_model(sizes: Sizes, experts: bool) -> Any:
    """A model of transformers, its weights drawn from a seed."""
    fields: dict[str, Any] = dict(
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=4 * sizes.positions,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    if not experts:
        inner = sizes.chosen * sizes.inner
        return transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(intermediate_size=inner, **fields)
        )
    config = transformers.Qwen3MoeConfig(
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.chosen,
        moe_intermediate_size=sizes.inner,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        # Faster on a CPU than their loop over experts.
        experts_implementation="grouped_mm",
        **fields,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def our_step(decoder: Any, tokens: np.ndarray) -> Callable[[], list[Any]]:
    Batch = Axis(BATCH_AXIS, tokens.shape[0])
    Pos = Axis(POSITION_AXIS, tokens.shape[1])
    named = hax.named(jnp.asarray(tokens, jnp.int32), (Batch, Pos))
    has_target = hax.broadcast_axis(
        (hax.arange(Pos) < Pos.size - 1).astype(jnp.float32), Batch
    )
    batch = TokenBatch(named, hax.roll(named, -1, Pos), has_target)
    config = AdamWConfig(
        learning_rate=LEARNING_RATE, warmup=0, schedule=ConstantSchedule()
    )
    optimizer = build_optimizer(config, 1_000)
    run = TrainStep(next_token_loss, optimizer)
    compiled = eqx.filter_jit(run, donate="all-except-first")
    states = [TrainState.init(decoder, optimizer)]

    def ours() -> list[Any]:
        state, metrics = compiled(batch, states.pop())
        states.append(state)
        return [
            jax.block_until_ready((state, metrics))[1]["loss"],
            metrics["grad_norm"],
        ]

    return ours


def their_step(model: Any, tokens: Any, recomputed: bool) -> Callable[[], list[Any]]:
    defaults = AdamWConfig()
    betas = (defaults.beta1, defaults.beta2)
    model.train()
    if recomputed:
        model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=betas,
        eps=defaults.epsilon,
        weight_decay=defaults.weight_decay,
        fused=True,
    )

    def theirs() -> list[Any]:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            model.parameters(), defaults.max_grad_norm or 1e30
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [loss.item(), norm.item()]

    return theirs


if __name__ == "__main__":
    main()
