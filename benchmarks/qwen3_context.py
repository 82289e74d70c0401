"""Memory of Qwen3-30B-A3B, or another decoder, at long context under each policy; the longest that fits.

Forward and backward are compiled for a device that need not be attached, and nothing is run:

    python -m benchmarks.qwen3_context --target h200
    python -m benchmarks.qwen3_context --target h200 --longest 80GiB 139GiB
    python -m benchmarks.qwen3_context --target h200 --presets auto blockwise --tokens 65536
    python -m benchmarks.qwen3_context --target v5p --devices 8 --tokens 65536 --policies nested
    python -m benchmarks.qwen3_context --target h200 --devices 8 --tokens 1048576 --divide positions
    python -m benchmarks.qwen3_context --target h200 --devices 8 --tokens 65536 --divide experts
    python -m benchmarks.qwen3_context --target h200 --tokens 65536 --tiles 1 2 4
    python -m benchmarks.qwen3_context --target h200 --tokens 65536 --policies nested --experts block tokamax
    python -m benchmarks.qwen3_context --target h200 --config models/configs/gpt_oss_20b_65k_lora.yaml

Model and adapters are those of `models/configs/qwen3_30b_a3b_65k_lora.yaml`, with one sequence per device.
Further options are those of the config, such as `--model.experts.backend block`.
With another `--config`, its name takes the place of `qwen3` in the names of the results.
With `--devices`, weights are sharded over a mesh by the config's `trainer.mesh`; with `--divide
positions` one sequence is divided over all, with `experts` the experts, in place of `embed`. Writes
`results/qwen3_context_<target>.json`, `results/qwen3_longest_<target>.json`, with `--tiles`, for each number
of `model.tiles`, `results/qwen3_tiles_<target>.json`, with `--experts`, for each backend of experts,
`results/qwen3_experts_<target>.json`, or with `--presets`, for the model's own policies, `True` and `nested`,
`results/qwen3_presets_<target>.json`.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis

from models.decoder.config import DecoderConfig, SparseDecoderConfig
from models.lm import build_model, next_token_loss
from models.lora import with_adapters
from models.run_config import LmRunConfig
from stacked_remat import ScanCheckpointPolicy, ScanCheckpointSpec, memory
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

from .record import RESULTS, memory_row, write_results

CONFIG = Path(__file__).parents[1] / "models/configs/qwen3_30b_a3b_65k_lora.yaml"

POLICIES: dict[str, ScanCheckpointSpec] = {
    "True": True,
    "nested": "nested",
    "nested, offload": ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "offload": "offload",
}
MESHES: dict[str, MeshConfig] = {
    "positions": MeshConfig({"context": -1}, {"position": "context"}, {"embed": "context"}),
    "experts": MeshConfig({"expert": -1}, {"batch": "expert", "experts": "expert"}, {"experts": "expert"}),
}
LEANEST = ("nested", "nested, offload", "offload")
"""The policies of the search for the longest context, by increasing traffic with the host."""


def main(arguments: list[str] | None = None) -> Path:
    options, altered = _parser().parse_known_args(arguments)
    config = parse_config(LmRunConfig, ["--config_path", str(options.config), *altered])
    if options.longest:
        name, rows = "longest", _longest(config, options)
    elif options.presets:
        name, rows = "presets", _presets(config, options)
    elif options.tiles:
        name, rows = "tiles", []
        for tiles in options.tiles:
            altered = dataclasses.replace(config, model=dataclasses.replace(_decoder(config), tiles=tiles))
            rows += [{"tiles": tiles, **row} for row in _contexts(altered, options)]
    elif options.experts:
        name, rows = "experts", []
        for backend in options.experts:
            model = _decoder(config)
            if not isinstance(model, SparseDecoderConfig):
                raise SystemExit("A config of a decoder with experts is expected.")
            model = dataclasses.replace(model, experts=dataclasses.replace(model.experts, backend=backend))
            altered = dataclasses.replace(config, model=model)
            rows += [{"backend": backend, **row} for row in _contexts(altered, options)]
    else:
        name, rows = "context", _contexts(config, options)
    where = options.target if options.devices == 1 else f"{options.target}_{options.devices}"
    where += f"_{options.divide}" if options.divide else ""
    model = "qwen3" if options.config.resolve() == CONFIG.resolve() else options.config.stem
    path = options.out / f"{model}_{name}_{where}.json"
    write_results(path, target=options.target, devices=options.devices, rows=rows)
    print(f"wrote {path}")
    return path


def forward_and_backward(
    config: LmRunConfig, tokens: int, *, rows: int = 1
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Loss and gradients of what is trained, as a function of the policy, and the shapes of its arguments."""
    config = config.resolved(check_folder=False)

    def initial(remat: ScanCheckpointSpec) -> Any:
        def make() -> Any:
            key = jax.random.key(0)
            model = build_model(config.model, config.Vocab, remat=remat, key=key)
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

    def batch() -> TokenBatch:
        axes = (Axis(BATCH_AXIS, rows), Axis(POSITION_AXIS, tokens))
        ids = hax.zeros(axes, dtype=jnp.int32)
        return TokenBatch(ids, ids, hax.ones(axes, dtype=jnp.float32))

    return loss_and_gradients, (eqx.filter_eval_shape(batch), initial(True))


def _contexts(config: LmRunConfig, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    devices = memory.find_target(options.target).devices(options.devices)
    partitioning = Partitioning.of(MESHES.get(options.divide, config.trainer.mesh), devices)
    sequences = 1 if options.divide == "positions" else options.devices
    for tokens in options.tokens:
        for name in options.policies:
            fn, (batch, parts) = forward_and_backward(config, tokens, rows=sequences)
            args = (partitioning.batch_shapes(batch), partitioning.weight_shapes(parts))
            with partitioning.activations():
                found = memory.report(fn(POLICIES[name]), *args, target=options.target)
            rows.append({"tokens": tokens, "policy": name, **memory_row(found)})
            print(_line(tokens, name, found), flush=True)
    return rows


def _presets(config: LmRunConfig, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every policy of the model's own, `True` and `nested`, with each backend."""
    policies = {"True": POLICIES["True"], "nested": POLICIES["nested"]}
    policies |= {name: remat_policy(name, config.model.remat_presets) for name in config.model.remat_presets}
    rows = []
    for backend in options.presets:
        altered = _with_backend(config, backend)
        for tokens in options.tokens:
            for name, policy in policies.items():
                fn, args = forward_and_backward(altered, tokens)
                found = memory.report(fn(policy), *args, target=options.target)
                rows.append({"backend": backend, "tokens": tokens, "policy": name, **memory_row(found)})
                print(f"{backend:9} {_line(tokens, name, found)}", flush=True)
    return rows


def _with_backend(config: LmRunConfig, backend: Any) -> LmRunConfig:
    architecture = _decoder(config)
    attention = dataclasses.replace(architecture.attention, backend=backend)
    return dataclasses.replace(config, model=dataclasses.replace(architecture, attention=attention))


def _decoder(config: LmRunConfig) -> DecoderConfig:
    if not isinstance(config.model, DecoderConfig):
        raise SystemExit("A config of a decoder is expected.")
    return config.model


def _longest(config: LmRunConfig, options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each budget and policy the longest context that the planner says fits, in steps of `--step`."""
    rows = []
    for budget in options.longest:
        for name in LEANEST:
            fits, too_long = 0, options.limit // options.step + 1
            kept: memory.MemoryReport | None = None
            while too_long - fits > 1:
                middle = (fits + too_long) // 2
                found = _fitting(config, middle * options.step, name, budget, options.target)
                print(
                    f"{budget} {name}: {middle * options.step} {'fits' if found else 'does not fit'}",
                    flush=True,
                )
                fits, too_long, kept = (middle, too_long, found) if found else (fits, middle, kept)
            if kept is not None:
                rows.append(
                    {"budget": budget, "policy": name, "tokens": fits * options.step, **memory_row(kept)}
                )
                print(_line(fits * options.step, name, kept), flush=True)
    return rows


def _fitting(
    config: LmRunConfig, tokens: int, name: str, budget: str, target: str
) -> memory.MemoryReport | None:
    fn, args = forward_and_backward(config, tokens)
    try:
        planned = memory.plan(fn, *args, budget=budget, target=target, candidates=[POLICIES[name]])
    except (memory.BudgetError, memory.DoesNotFit):
        return None
    return planned.report


def _line(tokens: int, name: str, found: memory.MemoryReport) -> str:
    return (
        f"{tokens:9,}  {name:22}  temp {found.temporaries / 2**30:6.2f} GiB  "
        f"total {found.total / 2**30:7.2f} GiB  host {found.host.total / 2**30:6.2f} GiB  "
        f"{found.flops.matmul / (tokens * found.devices) / 1e9:6.0f} GFLOP a token"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="h200", choices=list(memory.TARGETS))
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 131_072, 262_144])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument(
        "--presets",
        nargs="+",
        default=[],
        help="backends of attention to try with the model's own policies",
    )
    parser.add_argument("--tiles", type=int, nargs="+", default=[], help="values of model.tiles to compare")
    parser.add_argument("--experts", nargs="+", default=[], help="backends of experts to compare")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--divide", choices=list(MESHES), help="over the devices, in place of `embed`")
    parser.add_argument("--longest", nargs="+", default=[], help="budgets to find the longest context for")
    parser.add_argument("--step", type=int, default=65_536, help="contexts are multiples of this")
    parser.add_argument("--limit", type=int, default=2**20, help="the longest context tried")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    main()
