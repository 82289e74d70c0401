"""Memory of a whole training step on several devices, and what they send each other.

The step is compiled for devices that need not be attached, and nothing is run:

    python -m benchmarks.divided_step --target v5p --devices 16 --trainer.mesh.param_mapping '{embed: data}'
    python -m benchmarks.divided_step --target h100 --devices 8 --layers 24 48 --updates after fused
    python -m benchmarks.divided_step --target h200 --policies offload --config my-model.yaml

Each device has one sequence. Updates come after the backward pass or within it (`fused`). Further options
are those of the config, such as `--model.experts.backend block`. Writes
`results/<config>_<target>_<devices>.json`: bytes of each device.
"""

import argparse
import dataclasses
import itertools
from pathlib import Path

from models.candidate import Candidate
from models.decoder.config import DecoderConfig
from models.run_config import LmRunConfig
from stacked_remat import memory
from stacked_remat.training import parse_config

from .qwen3_context import POLICIES
from .record import RESULTS, memory_row, write_results

CONFIG = Path(__file__).parents[1] / "models/configs/qwen3_30b_a3b_65k_fsdp.yaml"


def main(arguments: list[str] | None = None) -> Path:
    options, altered = _parser().parse_known_args(arguments)
    config = parse_config(LmRunConfig, ["--config_path", str(options.config), *altered])
    config = config.resolved(check_folder=False)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=options.devices))
    path = options.out / f"{options.config.stem}_{options.target}_{options.devices}.json"
    rows = []
    if not isinstance(config.model, DecoderConfig):
        raise SystemExit("A config of a decoder is expected.")
    for layers in options.layers or [config.model.num_layers]:
        for update, policy in itertools.product(options.updates, options.policies):
            step = Candidate(_altered(config, layers, update), options.target, options.devices)
            found = step.having({}, POLICIES[policy]).report()
            row = {"layers": layers, "tokens": config.data.seq_len, "policy": policy, "update": update}
            row["weights divided by"] = ", ".join(config.trainer.mesh.param_mapping)
            rows.append({**row, "sent": found.sent, **memory_row(found)})
            print(f"{layers} layers, update {update}, {policy}\n{found}", flush=True)
            write_results(path, target=options.target, devices=options.devices, rows=rows)
    print(f"wrote {path}")
    return path


def _altered(config: LmRunConfig, layers: int, update: str) -> LmRunConfig:
    assert isinstance(config.model, DecoderConfig)
    model = dataclasses.replace(config.model, num_layers=layers)
    trainer = dataclasses.replace(
        config.trainer, update=dataclasses.replace(config.trainer.update, fused=update == "fused")
    )
    return dataclasses.replace(config, model=model, trainer=trainer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--target", default="h100", choices=list(memory.TARGETS))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[], help="depths to compare; or the config's"
    )
    parser.add_argument("--policies", nargs="+", default=["nested"], choices=list(POLICIES))
    parser.add_argument("--updates", nargs="+", default=["after"], choices=["after", "fused"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    main()
