"""The entries of a table of fields: what each reads, and that it writes that again."""

import dataclasses

import pytest

import models.hf_io.config_fields as hf
from models.gemma3 import Gemma3Config
from models.lfm2 import Lfm2Config
from models.minimax_m2 import MiniMaxM2Config
from models.parts.sections import FULL, LINEAR, SLIDING, AttentionConfig, ExpertsConfig
from models.qwen3_moe import Qwen3MoeConfig

WINDOW = AttentionConfig(window=3, layer_types=(SLIDING, FULL))
SPARSE = Qwen3MoeConfig(num_layers=2, experts=ExpertsConfig(dense_layers=(0,)))
NOT_FIRST = Qwen3MoeConfig(num_layers=2, experts=ExpertsConfig(dense_layers=(1,)))
ENTRIES = {
    "a field": (hf.Field("num_layers"), SPARSE),
    "null": (hf.Field("mlp_dim", 5, nullable=True), SPARSE),
    "a fixed value": (hf.Only("silu", "swish", written=True), SPARSE),
    "no padding": (hf.NoPadding(), SPARSE),
    "key and value heads": (hf.KeyValueHeads(7), SPARSE),
    "rotary": (hf.Rotary(), SPARSE),
    "a default scaling": (hf.Rotary(scaling={"rope_type": "linear"}), SPARSE),
    "a part of heads": (
        hf.Rotary(partial=1.0, width="rotary_dim"),
        MiniMaxM2Config(partial_rotary_factor=0.5),
    ),
    "rotary by kind": (
        hf.RotaryByKind(1e6, 9, local_theta="local_theta"),
        Gemma3Config(local_theta=77.0),
    ),
    "windows": (hf.Windows(5, period=4), Gemma3Config(num_layers=2, attention=WINDOW)),
    "windows in all layers": (
        hf.Windows(None, switch="is_on"),
        Gemma3Config(attention=AttentionConfig(window=3)),
    ),
    "hybrid layers": (
        hf.HybridLayers(linear=("conv", LINEAR)),
        Lfm2Config(num_layers=2, layer_types=(FULL, LINEAR)),
    ),
    "numbers of layers": (
        hf.LayerNumbers(first=1, others_name="others"),
        Lfm2Config(num_layers=2, layer_types=(LINEAR, FULL)),
    ),
    "two attributes": (hf.Field("num_layers", also="num_kv_heads"), SPARSE),
    "a dense prefix": (hf.DensePrefix(2), SPARSE),
    "dense layers": (hf.DensePrefix(2, types_name="types"), NOT_FIRST),
    "load balance": (hf.LoadBalance(), SPARSE),
}
KNOWN = {"num_layers": 2, "num_heads": 4, "attention.head_dim": 32}


def attribute(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(("entry", "config"), ENTRIES.values(), ids=ENTRIES)
def test_what_is_written_is_read_again(entry, config):
    name = "rope_theta" if isinstance(entry, hf.Rotary | hf.RotaryByKind) else "own"
    written = entry.write(config, name)
    given = hf.ConfigFields(written)
    found = entry.read(given, name, dict(KNOWN))
    for path, value in found.items():
        expected = attribute(config, path)
        if path == "experts.load_balance_weight":
            expected = config.experts.load_balance_weight_used
        if isinstance(value, list):
            value = tuple(value)
        assert value == expected, path
    assert not given._left


def test_an_attribute_may_be_always_the_same():
    given = hf.ConfigFields({"attention_bias": False})
    entry = hf.Ignored({"attention.bias": True})
    assert entry.read(given, "attention_bias", {}) == {"attention.bias": True}
    assert entry.write(SPARSE, "attention_bias") == {} and not given._left


def test_fields_of_a_section_are_read_and_written_by_dotted_names():
    fields = {"sizes.heads": hf.Field("num_heads", 5, aliases=("heads",))}
    fields = hf.with_defaults(fields | {"left": hf.KeyValueHeads()}, left=7)
    for document in (
        {"sizes": {"heads": 4}},
        {"heads": 4},
        {"sizes": None, "heads": 4},
    ):
        given = hf.ConfigFields(document)
        found = hf.read_decoder(given, fields)
        assert found == {"num_heads": 4, "num_kv_heads": 7} and not given._left
    assert hf.write_decoder(SPARSE, fields) == {"sizes": {"heads": 4}, "left": 2}
    given = hf.ConfigFields({"sizes": {"heads": 4, "other": 1}})
    hf.read_decoder(given, fields)
    with pytest.warns(UserWarning, match="config.json has sizes.other: unknown"):
        given.check_left("own", "config.json")
    with pytest.raises(ValueError, match="sizes must be dict, got 3"):
        hf.read_decoder(hf.ConfigFields({"sizes": 3}), fields)


def test_a_table_is_read_in_its_order():
    fields = {"own": hf.Field("num_heads"), "other": hf.KeyValueHeads()}
    given = hf.ConfigFields({"own": 8})
    assert hf.read_decoder(given, fields) == {"num_heads": 8, "num_kv_heads": 8}
    config = dataclasses.replace(SPARSE, num_heads=8, num_kv_heads=4)
    assert hf.write_decoder(config, fields) == {"own": 8, "other": 4}
