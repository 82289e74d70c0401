"""DeepSeek V3's files in 8-bit floats, layers that predict further tokens, and biases
of routers.
"""

import dataclasses
import json
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from ml_dtypes import float8_e4m3fn
from safetensors.numpy import load_file, save_file

from models.deepseek_v3 import DeepseekV3Config
from models.hf_io.decoder_weights import write_decoder
from models.hf_io.formats import config_from_hf
from models.hf_io.safetensors_folder import SINGLE, SafetensorsFolder
from models.lm import next_token_loss
from models.loading import load_model
from models.parts.decoder import Decoder
from models.parts.linear import cast_floating
from models.parts.sections import ExpertsConfig, LatentConfig
from models.run_config import LmRunConfig, find_model
from models.run_state import initial_state, run_optimizer, state_shapes
from stacked_remat.lora import LoraConfig
from stacked_remat.training import (
    ConfigError,
    SgdConfig,
    TokenBatch,
    TrainerConfig,
    UpdateConfig,
)

from ..blocks import assert_equal
from .random_weights import random_weights

Vocab = Axis("vocab", 10)
CONFIG = DeepseekV3Config(
    hidden_dim=132,  # two blocks, of which the second is not full
    num_layers=2,
    latent=LatentConfig(
        query_rank=5, key_value_rank=4, plain_dim=4, rotary_dim=2, value_dim=3
    ),
    experts=ExpertsConfig(2, 1, 6, dense_layers=(0,), router_dtype="float32"),
)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@pytest.fixture
def folder(tmp_path):
    """A folder in the published form, and one with the same weights, which are not
    quantized.
    """
    write_decoder(tmp_path / "plain", random_weights(Decoder.init, CONFIG, Vocab))
    write_decoder(tmp_path / "published", random_weights(Decoder.init, CONFIG, Vocab))
    tensors, exact = load_file(tmp_path / "plain" / SINGLE), {}
    for name in [name for name in tensors if "proj" in name]:
        blocks = tuple(-(-size // 128) for size in tensors[name].shape)
        scales = np.arange(1, 1 + np.prod(blocks), dtype=np.float32).reshape(blocks) / 8
        wide = np.kron(scales, np.ones((128, 128), np.float32))[
            tuple(map(slice, tensors[name].shape))
        ]
        small = (tensors[name] / wide).astype(float8_e4m3fn)
        exact[name] = small.astype(np.float32) * wide
        tensors |= {name: small, f"{name}_scale_inv": scales}
    save_file(
        load_file(tmp_path / "plain" / SINGLE) | exact, tmp_path / "plain" / SINGLE
    )
    tensors["model.layers.2.eh_proj.weight"] = np.zeros((3, 3), np.float32)
    save_file(tensors, tmp_path / "published" / SINGLE)
    change(tmp_path / "published", quantization_config=FP8, num_nextn_predict_layers=1)
    return tmp_path


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_files_in_8_bits_are_read(folder):
    found, expected = (
        find_model(str(folder / name)) for name in ("published", "plain")
    )
    assert found.Vocab == Vocab and found.config.num_layers == 2
    assert_equal(load_model(found), load_model(expected))


def test_biases_of_routers_are_float32_where_weights_are_bfloat16(folder):
    written, read = (
        load_model(find_model(str(folder / "plain"), dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    expected, router = (one.stacks["sparse"].stacked.mlp for one in (written, read))
    assert_equal(router.bias, expected.bias)
    assert router.router.weight.dtype == jnp.bfloat16
    in_layer = cast_floating(expected, jnp.bfloat16)
    assert_equal(in_layer.bias, expected.bias)
    assert in_layer.router.weight.dtype == jnp.bfloat16


def test_scales_of_other_blocks_are_not_taken_for_these(tmp_path):
    tensors = {
        "w": np.zeros((3, 3), float8_e4m3fn),
        "w_scale_inv": np.ones((2, 2), np.float32),
    }
    save_file(tensors, tmp_path / SINGLE)
    assert SafetensorsFolder.open(tmp_path).dtypes == {
        "w": "F8_E4M3",
        "w_scale_inv": "F32",
    }


def test_widths_of_heads_do_not_depend_on_that_of_the_stream():
    latent = dataclasses.replace(CONFIG.latent, plain_dim=5)
    assert dataclasses.replace(CONFIG, hidden_dim=30, latent=latent).head_dim == 7
    with pytest.raises(
        ValueError, match="model.num_kv_heads must be model.num_heads = 4, got 2"
    ):
        dataclasses.replace(CONFIG, num_kv_heads=2)
    with pytest.raises(ValueError, match="model.latent.rotary_dim = 3 must be even"):
        LatentConfig(rotary_dim=3)


def test_biases_of_routers_follow_the_load():
    experts = ExpertsConfig(
        4, 2, 6, dense_layers=(0,), router_dtype="float32", load_balance_weight=0.0
    )
    frozen = dataclasses.replace(CONFIG, hidden_dim=16, num_layers=3, experts=experts)
    tokens = hax.random.randint(
        jax.random.key(1), (Axis("batch", 2), Axis("position", 9)), 0, Vocab.size
    )
    batch = TokenBatch(tokens, tokens, hax.ones(tokens.axes))
    found = {}
    for bias in ("frozen", "by_load"):
        model = random_weights(
            Decoder.init, dataclasses.replace(frozen, bias=bias), Vocab
        )
        of_model = eqx.filter_value_and_grad(
            lambda model: next_token_loss(model, batch)[0]
        )
        loss, gradient = eqx.filter_jit(of_model)(model)
        found[bias] = (
            loss,
            gradient.layers.stacks["sparse"].stacked.mlp.bias.value.array,
        )
    load = eqx.filter_jit(lambda model: model.layer_states(tokens)[1].load.array)(model)
    assert found["frozen"][0] == found["by_load"][0] and not np.any(found["frozen"][1])
    np.testing.assert_array_equal(
        found["by_load"][1], np.sign(load - load.mean(axis=-1, keepdims=True))
    )
    assert np.any(found["by_load"][1])


@pytest.mark.deep
def test_the_norm_of_gradients_leaves_the_biases_out():
    config = LmRunConfig(
        model=dataclasses.replace(CONFIG, bias="by_load"),
        vocab_size=Vocab.size,
        optimizer=SgdConfig(
            learning_rate=1.0,
            warmup=0,
            momentum=0.0,
            weight_decay=0.0,
            max_grad_norm=1e-3,
        ),
    )
    state = initial_state(config)
    gradients = jax.tree.map(jnp.ones_like, state.trained)
    optimizer: Any = run_optimizer(config)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        updates, _ = optimizer.update(gradients, state.optimizer_state, state.trained)
    of_biases = updates.layers.stacks["sparse"].stacked.mlp.bias.value.array
    np.testing.assert_array_equal(of_biases, -1.0)
    others = eqx.tree_at(
        lambda model: model.layers.stacks["sparse"].stacked.mlp.bias, updates, None
    )
    squares = sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(others))
    np.testing.assert_allclose(squares, 1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"lora": LoraConfig()},
        {"trainer": TrainerConfig(update=UpdateConfig(fused=True))},
    ],
)
def test_biases_by_load_are_refused_where_nothing_would_update_them(options):
    with pytest.raises(ValueError, match="model.bias: by_load goes with neither lora"):
        LmRunConfig(model=dataclasses.replace(CONFIG, bias="by_load"), **options)


def test_biases_by_load_are_not_frozen():
    model = dataclasses.replace(CONFIG, bias="by_load")
    config = LmRunConfig(
        model=model, vocab_size=Vocab.size, freeze=["*.mlp.bias.value"]
    )
    with pytest.raises(
        ConfigError, match="match layers.sparse.*.mlp.bias.value, the biases of rout"
    ):
        state_shapes(config)
    other = dataclasses.replace(
        config, freeze=["*.router.*", "*.bias.value"], model=CONFIG
    )
    assert state_shapes(other)


def test_widths_of_heads_in_a_config_that_are_not_used_are_named():
    fields = {"model_type": "deepseek_v3", "vocab_size": 8}
    fields |= {"hidden_size": 8, "num_hidden_layers": 4, "intermediate_size": 8}
    fields |= {"num_attention_heads": 4}
    config_from_hf(fields | {"head_dim": 64, "qk_head_dim": 192})
    with pytest.warns(UserWarning, match=r"config.json has head_dim, qk_head_dim: "):
        config_from_hf(fields | {"head_dim": 192, "qk_head_dim": 64})
