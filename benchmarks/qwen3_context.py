"""Memory of Qwen3-30B-A3B, or another decoder, at long context under each policy; the
longest that fits.

Forward and backward are compiled for a device that need not be attached, and nothing is
run:

    python -m benchmarks.qwen3_context --target h200
    python -m benchmarks.qwen3_context longest --target h200 --budgets 80GiB 139GiB
    python -m benchmarks.qwen3_context gathers --target h200
        --model.attention.backend blockwise
    python -m benchmarks.qwen3_context planned --target h200
    python -m benchmarks.qwen3_context --target h200 --presets auto blockwise
        --tokens 65536
    python -m benchmarks.qwen3_context --target v5p --devices 8 --tokens 65536
        --policies nested
    python -m benchmarks.qwen3_context --target h200 --devices 8 --tokens 1048576
        --divide positions
    python -m benchmarks.qwen3_context --target h200 --tokens 65536 --tiles 1 2 4
    python -m benchmarks.qwen3_context --target h200 --tokens 65536
        --policies nested --experts block tokamax
    python -m benchmarks.qwen3_context --target h200 --tokens 65536 --documents 8
        --policies True nested
    python -m benchmarks.qwen3_context --target h200
        --config models/configs/gpt_oss_20b_65k_lora.yaml

Model and adapters are those of `models/configs/qwen3_30b_a3b_65k_lora.yaml`, with one
sequence per device. Further options are those of the config, such as
`--model.experts.backend block`. With `--devices`, weights are sharded over a mesh by
the config's `trainer.mesh`; with `--divide positions` one sequence is divided over all,
with `experts` the experts, in place of `embed`. A sequence is one document, or of
`--documents` equal ones. `--tiles` compares values of `model.tiles`, `--experts`
backends of experts, and `--presets` backends of attention, with the model's own
policies, `False`, `True` and `nested`. `planned` gives the planner as much memory as
each of these takes. `gathers` counts the collectives of weights in the loops over
layers, as `benchmarks.gathered_ahead` does, with experts and other weights divided over
the same devices. Writes `results/qwen3_<context, documents, tiles, experts, presets,
longest, planned or gathers>_<target>.json`, with another `--config` its name in place
of `qwen3`.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis

from models.lm import next_token_loss
from models.parts.decoder import Decoder
from models.run_config import LmRunConfig
from models.run_state import with_adapters
from stacked_remat import ScanCheckpointPolicy, ScanCheckpointSpec, memory
from stacked_remat.memory._call import trace_call
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    MeshConfig,
    Partitioning,
    TokenBatch,
    cast_parameters,
    parse_config,
    remat_policy,
)

from .command import Rows, benchmark, one_of
from .gathered_ahead import of_weights, with_text
from .record import compiled_row, memory_row

CONFIG = Path(__file__).parents[1] / "models/configs/qwen3_30b_a3b_65k_lora.yaml"

POLICIES: dict[str, ScanCheckpointSpec] = {
    "False": False,
    "True": True,
    "nested": "nested",
    "nested, offload": ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "offload": "offload",
}
MESHES: dict[str, MeshConfig] = {
    "positions": MeshConfig(
        {"context": -1}, {"position": "context"}, {"embed": "context"}
    ),
    "experts": MeshConfig(
        {"expert": -1}, {"batch": "expert", "experts": "expert"}, {"experts": "expert"}
    ),
}
WITH_EXPERTS = MeshConfig(
    {"data": -1},
    {"batch": "data", "experts": "data"},
    {"experts": "data", "embed": "data"},
)
LEANEST = ("nested", "nested, offload", "offload")
"""The policies of the search for the longest context, by increasing traffic with the
host.
"""


def _result(
    config: Path,
    target: str,
    devices: int = 1,
    divide: str = "",
    documents: int = 1,
    **given: Any,
) -> str:
    model = "qwen3" if config.resolve() == CONFIG.resolve() else config.stem
    kind = next(
        (key for key in ("tiles", "experts", "presets") if given.get(key)), "context"
    )
    kind = "longest" if "budgets" in given else kind
    kind = "gathers" if "layers" in given else kind
    kind = "planned" if "host_budget" in given else kind
    kind = "documents" if documents > 1 else kind
    parts = [
        model,
        kind,
        target,
        *([str(devices)] if devices > 1 else []),
        *([divide] if divide else []),
    ]
    return "_".join(parts)


@benchmark(_result)
def context(
    target: str = "h200",
    config: Path = CONFIG,
    tokens: tuple[int, ...] = (65_536, 131_072, 262_144),
    policies: tuple[str, ...] = tuple(POLICIES),
    devices: int = 1,
    divide: str = "",
    documents: int = 1,
    tiles: tuple[int, ...] = (),
    experts: tuple[str, ...] = (),
    presets: tuple[str, ...] = (),
    overrides: tuple[str, ...] = (),
) -> Rows:
    """The memory of each context under each policy, and with each value of what is
    compared.
    """
    compared = {"tiles": ("tiles", tiles), "backend": ("experts.backend", experts)}
    compared |= {"backend": ("attention.backend", presets)} if presets else {}
    column, (key, values) = next(
        (one for one in compared.items() if one[1][1]), ("", ("", (None,)))
    )
    for value in values:
        varied = [] if value is None else [f"--model.{key}", str(value)]
        given = parse_config(
            LmRunConfig, ["--config_path", str(config), *overrides, *varied]
        )
        chosen = {
            name: POLICIES[name]
            for name in (("False", "True", "nested") if presets else policies)
        }
        if presets:
            own = given.model.remat_presets
            chosen |= {name: remat_policy(name, own) for name in own}
        partitioning = Partitioning.of(
            MESHES.get(divide, given.trainer.mesh),
            memory.find_target(target).devices(devices),
        )
        for length, (name, policy) in itertools.product(tokens, chosen.items()):
            rows = 1 if divide == "positions" else devices
            fn, args = on_mesh(
                partitioning, given, length, rows=rows, documents=documents
            )
            with partitioning.activations():
                found = compiled_row(fn(policy), args, target)
            row = {column: value} if column else {}
            yield {**row, "tokens": length, "policy": name, **found}


@benchmark(_result)
def longest(
    target: str = "h200",
    config: Path = CONFIG,
    budgets: tuple[str, ...] = ("80GiB", "139GiB"),
    step: int = 65_536,
    limit: int = 2**20,
    overrides: tuple[str, ...] = (),
) -> Rows:
    """For each budget and policy the longest context up to a limit, in steps, that the
    planner says fits.
    """
    given = parse_config(LmRunConfig, ["--config_path", str(config), *overrides])
    for budget, name in itertools.product(budgets, LEANEST):

        def fitting(
            steps: int, name: str = name, budget: str = budget
        ) -> memory.MemoryReport | None:
            fn, args = forward_and_backward(given, steps * step)
            try:
                return memory.plan(
                    fn,
                    *args,
                    budget=budget,
                    target=target,
                    candidates=[POLICIES[name]],
                    vary=False,
                ).report
            except (memory.BudgetError, memory.DoesNotFit):
                return None

        fits = 0
        too_long = limit // step + 1
        kept: memory.MemoryReport | None = None
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if found := fitting(middle):
                fits = middle
                kept = found
            else:
                too_long = middle
            print(
                f"{budget} {name}: {middle * step}"
                f" {'fits' if found else 'does not fit'}",
                flush=True,
            )
        if kept is not None:
            yield {
                "budget": budget,
                "policy": name,
                "tokens": fits * step,
                **memory_row(kept),
            }


@benchmark(_result)
def planned(
    target: str = "h200",
    config: Path = CONFIG,
    tokens: int = 65_536,
    host_budget: str = "0GiB",
    policies: tuple[str, ...] = (),
    overrides: tuple[str, ...] = (),
) -> Rows:
    """What the planner finds where the budget is what a policy of the model's takes,
    beside that policy.
    """
    given = parse_config(LmRunConfig, ["--config_path", str(config), *overrides])
    own = given.model.remat_presets
    names = policies or ("True", "nested", *own)
    fn, args = forward_and_backward(given, tokens)
    with tempfile.TemporaryDirectory() as cache:
        for name in names:
            policy = POLICIES[name] if name in POLICIES else remat_policy(name, own)
            alone = memory.report(fn(policy), *args, target=target, cache=cache)
            if alone.host.total > memory.parse_bytes(host_budget):
                continue
            found = memory.plan(
                fn,
                *args,
                budget=alone.total,
                host_budget=host_budget,
                candidates=[*memory.CANDIDATES, *own.values()],
                target=target,
                cache=cache,
            )
            flops = found.report.flops.matmul
            yield {
                "policy": name,
                "total": alone.total,
                "matmul_flops": alone.flops.matmul,
                "planned": memory.Trial(found.policy, found.report).name,
                "planned_total": found.report.total,
                "planned_matmul_flops": flops,
                "ratio": round(flops / alone.flops.matmul, 4),
                "compilations": len(found.tried.trials),
            }


@benchmark(_result)
def gathers(
    target: str = "h200",
    config: Path = CONFIG,
    tokens: tuple[int, ...] = (16_384,),
    policies: tuple[str, ...] = ("True", "nested", "offload"),
    layers: int = 8,
    devices: int = 8,
    overrides: tuple[str, ...] = (),
) -> Rows:
    """The collectives of weights in loops, and those that are waited for."""
    options = ["--config_path", str(config), "--model.num_layers", str(layers)]
    given = parse_config(LmRunConfig, [*options, *overrides])
    for length, name in itertools.product(tokens, policies):
        program, text = compiled_on(
            WITH_EXPERTS, given, target, devices, length, POLICIES[name]
        )
        in_loops = of_weights(text)
        yield {
            "tokens": length,
            "policy": name,
            "layers": layers,
            "collectives in loops": len(in_loops),
            "waited for": sum(not one.products for one in in_loops),
            "temporaries": program.memory_analysis().temp_size_in_bytes,
        }


main = one_of(context=context, longest=longest, planned=planned, gathers=gathers)


def compiled_on(
    mesh: MeshConfig,
    config: LmRunConfig,
    target: str,
    devices: int,
    tokens: int,
    remat: ScanCheckpointSpec,
) -> tuple[Any, str]:
    """Forward and backward of a sequence on each device, compiled, and its text."""
    partitioning = Partitioning.of(mesh, memory.find_target(target).devices(devices))
    fn, args = on_mesh(partitioning, config, tokens, rows=devices)
    with partitioning.activations():
        traced = trace_call((fn(remat), args, {}), target, ()).traced
        return with_text(traced, partitioning.mesh.devices.flat[0])


def random_batch(rows: int, tokens: int, vocab: int, documents: int = 1) -> TokenBatch:
    """Random tokens, which are to predict the next one, in documents of one length."""
    axes = (Axis(BATCH_AXIS, rows), Axis(POSITION_AXIS, tokens))
    ids = hax.random.randint(jax.random.key(1), axes, 0, vocab)
    batch = TokenBatch(
        ids, hax.roll(ids, -1, axes[1]), hax.ones(axes, dtype=jnp.float32)
    )
    if documents == 1:
        return batch
    at = hax.arange(axes[1], dtype=jnp.int32).broadcast_to(axes)
    length = -(-tokens // documents)
    return dataclasses.replace(batch, documents=at // length + 1, positions=at % length)


def on_mesh(
    partitioning: Partitioning, config: LmRunConfig, tokens: int, **batch_options: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`forward_and_backward`, with arguments that are divided over a mesh."""
    fn, (batch, parts) = forward_and_backward(config, tokens, **batch_options)
    return fn, (partitioning.batch_shapes(batch), partitioning.weight_shapes(parts))


def forward_and_backward(
    config: LmRunConfig, tokens: int, *, rows: int = 1, documents: int = 1
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Loss and gradients of what is trained, as a function of the policy, and the
    shapes of its arguments.
    """
    config = config.resolved(check_folder=False)

    def initial(remat: ScanCheckpointSpec) -> Any:
        def make() -> Any:
            key = jax.random.key(0)
            model = Decoder.init(config.model, config.Vocab, remat=remat, key=key)
            model = cast_parameters(model, config.trainer.precision.parameters)
            model, trainable = with_adapters(model, config.lora, key=key)
            return eqx.partition(model, trainable)

        return eqx.filter_eval_shape(make)

    def loss_and_gradients(remat: ScanCheckpointSpec) -> Callable[..., Any]:
        structure = jax.tree.structure(initial(remat))

        def run(batch: TokenBatch, parts: Any) -> Any:
            trained, frozen = jax.tree.unflatten(structure, jax.tree.leaves(parts))
            return eqx.filter_value_and_grad(
                lambda trained: next_token_loss(eqx.combine(trained, frozen), batch)[0]
            )(trained)

        return run

    batch = eqx.filter_eval_shape(
        random_batch, rows, tokens, config.Vocab.size, documents
    )
    return loss_and_gradients, (batch, initial(True))


if __name__ == "__main__":
    main()
