"""The architecture of a folder, and what of a config a run decides."""

import dataclasses
import json

import pytest

from models.decoder.config import (
    FULL,
    SLIDING,
    AttentionConfig,
    ExpertsConfig,
    RotaryConfig,
)
from models.gpt_oss import GptOssConfig
from models.hf_io.formats import (
    config_to_hf,
    differing_fields,
    pretrained_config,
    read_hf_config,
    written_out,
)
from models.qwen3 import Qwen3Config, Qwen3MoeConfig
from stacked_remat.ops import YarnRotary

WINDOWED = AttentionConfig(head_dim=8, window=5, layer_types=(SLIDING, FULL))
SIZES = dict(hidden_dim=32, num_heads=8, num_kv_heads=4, attention=WINDOWED, rotary=RotaryConfig(100.0))
EXPERTS = ExpertsConfig(load_balance_weight=0.2)
CONFIGS = [
    Qwen3Config(**SIZES, mlp_dim=64),
    Qwen3MoeConfig(
        **SIZES | {"attention": AttentionConfig(head_dim=8, window=5)}, mlp_dim=64, experts=EXPERTS
    ),
    GptOssConfig(**SIZES, experts=EXPERTS),
]
OTHER = {
    "hidden_dim": 16,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 48,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "attention.head_dim": 2,
    "attention.bias": True,
    "attention.window": 4,
    "attention.layer_types": (FULL, SLIDING),
    "rotary.theta": 50.0,
    "rotary.scaling": YarnRotary(2.0, 64),
    "rotary.max_position_embeddings": 64,
    "experts.num_experts": 4,
    "experts.experts_per_token": 1,
    "experts.intermediate_dim": 16,
    "experts.norm_topk_prob": False,
    "experts.dense_layers": (1,),
}
"""Another value for each field that a folder decides."""
OF_RUN = {
    "initializer_range": 0.5,
    "tiles": 2,
    "compute_dtype": "bfloat16",
    "attention.backend": "exact",
    "experts.load_balance_weight": 0.3,
    "experts.load_balance_loss": "pooled",
    "experts.z_loss_weight": 0.1,
    "experts.backend": "block",
    "experts.router_dtype": "float32",
}
"""The same for each that a run decides."""
FIXED = {  # in no folder of that architecture
    Qwen3MoeConfig: ("attention.layer_types", "mlp_dim"),
    GptOssConfig: ("mlp_dim", "experts.norm_topk_prob", "experts.dense_layers"),
}


def names(config, before=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "scaling" and dataclasses.is_dataclass(value):
            yield from names(value, f"{before}{field.name}.")
        else:
            yield before + field.name


def changed(config, name, value):
    first, _, rest = name.partition(".")
    return dataclasses.replace(
        config, **{first: changed(getattr(config, first), rest, value) if rest else value}
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_field_is_the_folders_or_the_runs(config, tmp_path):
    """A field that belongs to neither would refuse every config that sets it."""
    assert {*names(CONFIGS[1])} == {*OTHER, *OF_RUN}
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config, 99, dtype="float32")))
    for name in set(names(config)) - {*FIXED.get(type(config), ())}:
        wanted = changed(config, name, (OTHER | OF_RUN)[name])
        found = pretrained_config(wanted, read_hf_config(tmp_path)[0])
        differing = differing_fields("model", written_out(wanted), written_out(found))
        if name in OF_RUN:
            assert differing == []
            assert written_out(found) == written_out(wanted)
        elif name != "rotary.scaling":  # stretches the folder's context
            assert f"model.{name}" in [line.split(":")[0] for line in differing]
