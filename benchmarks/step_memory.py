"""Memory of whole training steps of configs, on one device or several, and what these
send each other.

The steps are compiled for devices that need not be attached, and nothing is run:

    python -m benchmarks.step_memory --target v5p --devices 16
        --trainer.mesh.param_mapping '{embed: data}'
    python -m benchmarks.step_memory --target h100 --devices 8 --layers 24 48
        --updates after fused
    python -m benchmarks.step_memory --target h200 --configs A.yaml B.yaml
        --context 65536 1048576

With `--devices` each has one sequence; otherwise one device has the config's batch.
Updates come after the backward pass or within it (`fused`). With `--frozen`, weights
under adapters are stored in these forms (`trainer.precision.frozen`). Where an option
is not given, the config says it. Further options are those of the config, such as
`--model.experts.backend block`. Writes `results/<config>_<target>_<devices>.json` or
`results/streaming_steps_<target>.json`: bytes of each device.
"""

import itertools
from pathlib import Path
from typing import Any

from models.candidate import Candidate
from models.parts.config import DecoderConfig
from models.run_config import LmRunConfig
from stacked_remat import memory
from stacked_remat.training import parse_config

from .command import Rows, benchmark
from .qwen3_context import POLICIES
from .record import memory_row

CONFIG = Path(__file__).parents[1] / "models/configs/qwen3_30b_a3b_65k_fsdp.yaml"


def _result(configs: tuple[Path, ...], target: str, devices: int, **_: Any) -> str:
    return (
        f"{configs[0].stem}_{target}_{devices}"
        if devices
        else f"streaming_steps_{target}"
    )


@benchmark(_result)
def main(
    configs: tuple[Path, ...] = (CONFIG,),
    target: str = "h100",
    devices: int = 0,
    layers: tuple[int, ...] = (),
    context: tuple[int, ...] = (),
    policies: tuple[str, ...] = (),
    updates: tuple[str, ...] = (),
    frozen: tuple[str, ...] = (),
    overrides: tuple[str, ...] = (),
) -> Rows:
    compared = itertools.product(
        configs,
        layers or [None],
        context or [None],
        updates or [None],
        frozen or [None],
        policies or [""],
    )
    for file, depth, tokens, update, stored, policy in compared:
        varied = {
            "model.num_layers": depth,
            "data.seq_len": tokens,
            "data.batch_size": devices or None,
            "trainer.update.fused": update and str(update == "fused").lower(),
            "trainer.precision.frozen": stored,
        }
        given = [
            part
            for key, value in varied.items()
            if value
            for part in (f"--{key}", str(value))
        ]
        config = parse_config(
            LmRunConfig, ["--config_path", str(file), *overrides, *given]
        )
        config = config.resolved(check_folder=False)
        assert isinstance(config.model, DecoderConfig)
        step = Candidate(config, target, devices or 1)
        row = {
            "config": file.stem,
            "layers": config.model.num_layers,
            "tokens": config.data.seq_len,
            "policy": policy or str(config.remat),
            "update": "fused" if config.trainer.update.fused else "after",
            "weights divided by": ", ".join(config.trainer.mesh.param_mapping),
        }
        if stored:
            precision = config.trainer.precision
            row["frozen weights"] = precision.frozen or precision.parameters
        try:
            found = (step.having({}, POLICIES[policy]) if policy else step).report()
        except memory.DoesNotFit as error:
            yield row | {"refused": str(error).splitlines()[0]}
            continue
        moved = _transfers(found, config.data.batch_size * config.data.seq_len)
        yield row | {"transfers": moved, "sent": found.sent, **memory_row(found)}


def _transfers(found: memory.MemoryReport, tokens: int) -> str:
    """What crosses to the host and back in a step, and whether that takes longer than
    computing.
    """
    moved = found.flops.bytes_from_host + found.flops.bytes_to_host
    least = found.least_time
    if not moved or least is None:
        return "-"
    bound = f"bound by the link at {tokens / least.transfer:,.0f} tokens/s"
    return f"{memory.readable_bytes(moved)}, {'hidden' if least.hidden else bound}"


if __name__ == "__main__":
    main()
