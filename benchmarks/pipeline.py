"""Memory of layers over devices, and what devices send each other, beside weights that
are fully sharded.

Whole training steps of adapters, of a batch in microbatches, are compiled for devices
that need not be attached, and not run:

    python -m benchmarks.pipeline --target h200
    python -m benchmarks.pipeline --target h200 --layers 96 --stages 8
        --schedules zero_bubble --data.seq_len 4096

The mesh has `--devices`. With `--stages 1` all of them divide the weights (FSDP). With
more, each stage has a group of devices, over which the weights of its layers are
divided. A microbatch has a sequence for each device of a group, and the batch has
`--sequences`. The model and adapters are those of
`models/configs/qwen3_235b_a22b_65k_lora.yaml`, or of `--config`; further options are
its keys. Writes
`results/pipeline_<config>_<target>_<devices>.json`, with bytes of each device.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from models.candidate import Candidate
from models.run_config import LmRunConfig
from stacked_remat import memory
from stacked_remat.training import MeshConfig, PipelineConfig, parse_config

from .command import Rows, benchmark
from .qwen3_context import POLICIES
from .record import memory_row

CONFIG = Path(__file__).parents[1] / "models/configs/qwen3_235b_a22b_65k_lora.yaml"
STAGE = "stage"


def _result(config: Path, target: str, devices: int, **_: Any) -> str:
    return f"pipeline_{config.stem}_{target}_{devices}"


@benchmark(_result)
def main(
    config: Path = CONFIG,
    target: str = "h200",
    devices: int = 8,
    sequences: int = 32,
    layers: tuple[int, ...] = (94,),
    stages: tuple[int, ...] = (1, 2, 8),
    schedules: tuple[str, ...] = ("1f1b",),
    policies: tuple[str, ...] = ("nested",),
    overrides: tuple[str, ...] = (),
) -> Rows:
    given = [f"--data.batch_size={sequences}", "--trainer.streaming=false"]
    command = ["--config_path", str(config), *overrides, *given]
    run = parse_config(LmRunConfig, command).resolved(check_folder=False)
    for depth, count, policy in itertools.product(layers, stages, policies):
        for schedule in schedules if count > 1 else ("",):
            step = Candidate(_divided(run, devices, count, schedule), target, devices)
            step = step.having({"model.num_layers": depth}, POLICIES[policy])
            microbatches = step.config.trainer.update.microbatches
            row: dict[str, Any] = {
                "layers": depth,
                "tokens": run.data.seq_len,
                "stages": count,
                "devices of a stage": devices // count,
                "microbatches": microbatches,
                "schedule": schedule or "-",
                "policy": policy,
            }
            if schedule != "zero_bubble":
                row["idle"] = f"{step.idle:.0%}"
            try:
                found = step.report()
            except memory.DoesNotFit as error:
                yield row | {"refused": str(error).splitlines()[0]}
                continue
            yield row | {"sent": found.sent, **memory_row(found)}


def _divided(run: LmRunConfig, devices: int, stages: int, schedule: Any) -> LmRunConfig:
    """The run on these devices, with layers over stages where there are several."""
    group = devices // stages
    # XLA for GPUs copies stacks of experts that `embed` divides
    experts = {} if run.model.sparse is None else {"experts": "data"}
    mesh = MeshConfig(
        {STAGE: stages, "data": group},
        param_mapping={**experts, "embed": "data"},
    )
    update = dataclasses.replace(
        run.trainer.update, microbatches=run.data.batch_size // group
    )
    pipeline = PipelineConfig(STAGE, schedule) if stages > 1 else None
    trainer = dataclasses.replace(
        run.trainer, mesh=mesh, update=update, pipeline=pipeline
    )
    return dataclasses.replace(run, trainer=trainer)


if __name__ == "__main__":
    main()
