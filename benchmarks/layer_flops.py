"""FLOPs of the forward pass by kinds of layers, at each context; nothing is compiled.

    python -m benchmarks.layer_flops
        --configs models/configs/kimi_linear_48b_65k_lora.yaml

A decoder's layers are of a few kinds, such as `linear_sparse`. A row has one kind at
one context: how many layers are of it, the FLOPs of one of them in matrix products, and
the share of them all in those of the layers. Writes `results/layer_flops.json`.
"""

from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from models.parts.config import DecoderConfig, LayerKind
from models.parts.tokens import Tokens
from models.run_config import LmRunConfig
from stacked_remat import memory
from stacked_remat.training import BATCH_AXIS, POSITION_AXIS, parse_config

from .command import Rows, benchmark

CONFIGS = Path(__file__).parents[1] / "models/configs"


def flops_of_layer(config: DecoderConfig, kind: LayerKind, tokens: int) -> int:
    """FLOPs in matrix products of one layer of a kind for one sequence."""
    axes = Axis(BATCH_AXIS, 1), Axis(POSITION_AXIS, tokens), config.Embed

    def forward(x: NamedArray) -> NamedArray:
        layer = config.init_layer(kind, key=jax.random.key(0))
        rotary = layer.rotary
        table = None if rotary is None else rotary.table(hax.arange(axes[1]))
        x, _ = layer(x, Tokens(table))
        return x

    x = eqx.filter_eval_shape(hax.zeros, axes, config.compute_dtype)
    return memory.count_flops(eqx.filter_make_jaxpr(forward)(x)[0]).matmul


@benchmark("layer_flops")
def main(
    configs: tuple[Path, ...] = (
        CONFIGS / "qwen3_next_80b_a3b_65k_lora.yaml",
        CONFIGS / "kimi_linear_48b_65k_lora.yaml",
    ),
    tokens: tuple[int, ...] = (65_536, 262_144, 1_048_576),
    overrides: tuple[str, ...] = (),
) -> Rows:
    for file in configs:
        given = parse_config(LmRunConfig, ["--config_path", str(file), *overrides])
        config = given.model
        assert isinstance(config, DecoderConfig)
        for length in tokens:
            layers = {}
            flops = {}
            for name, kind in config.kinds.items():
                layers[name] = len(config.layers_of(name))
                flops[name] = flops_of_layer(config, kind, length)
            total = sum(layers[name] * flops[name] for name in flops)
            for name in flops:
                yield {
                    "config": file.stem,
                    "tokens": length,
                    "kind": name,
                    "layers": layers[name],
                    "matmul_flops": flops[name],
                    "share": f"{layers[name] * flops[name] / total:.0%}",
                }


if __name__ == "__main__":
    main()
