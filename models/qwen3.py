"""Qwen3 (Yang et al. 2025), dense and with experts: RMS norms of queries and keys over
each head.
"""

from dataclasses import dataclass
from typing import Any

import jax
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from models.hf_io import config_fields as hf
from models.hf_io.formats import ALTERNATING, HfFormat, register_format
from models.parts.attention import Attention
from models.parts.cache import LayerCache
from models.parts.config import DecoderConfig, LayerKind, SparseDecoderConfig
from models.parts.decoder import DecoderLayer, LayerOutput, residual
from models.parts.experts import init_feed_forward
from models.parts.mlp import FeedForward
from models.parts.norms import Norm, rms_norm
from models.parts.sections import ExpertsConfig
from models.parts.tokens import Tokens
from models.qwen2 import read_later_windows, write_later_windows
from stacked_remat._messages import shown


class Qwen3Layer(DecoderLayer):
    """A layer of Qwen3, with an MLP or with experts."""

    input_norm: Norm
    attention: Attention
    post_attention_norm: Norm
    mlp: FeedForward

    @staticmethod
    def init(
        config: DecoderConfig, kind: LayerKind, *, key: PRNGKeyArray
    ) -> "Qwen3Layer":
        """Makes a layer from `key`."""
        attention_key, mlp_key = jax.random.split(key)
        return Qwen3Layer(
            input_norm=config.init_norm(),
            attention=Attention.init(
                config,
                rotary=config.rotary,
                window=kind.window,
                # Over each head, before rotation; OLMo's are over all heads.
                q_norm=rms_norm(config.HeadDim, config.rms_norm_eps),
                k_norm=rms_norm(config.HeadDim, config.rms_norm_eps),
                key=attention_key,
            ),
            post_attention_norm=config.init_norm(),
            mlp=init_feed_forward(config, kind, key=mlp_key),
        )

    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Adds attention, then the MLP or experts, each of normalised input."""
        # Qwen3DecoderLayer of transformers
        attended, cache = self.attention(self.input_norm(x), tokens, cache)
        x = residual(x + attended)
        # The MLP or experts apply the norm themselves, tile by tile.
        mixed, statistics = self.mlp(x, tokens, norm=self.post_attention_norm)
        return x + mixed, cache, statistics


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """A dense Qwen3 decoder: every layer has one MLP."""

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer from `key`."""
        return Qwen3Layer.init(self, kind, key=key)


@dataclass(frozen=True)
class Qwen3MoeConfig(SparseDecoderConfig):
    """A Qwen3 decoder with experts in every layer, or in all but some."""

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Qwen3Layer:
        """Makes a layer from `key`."""
        return Qwen3Layer.init(self, kind, key=key)


FIELDS = hf.DENSE_SIZES | {
    "head_dim": hf.Field("attention.head_dim", 128, written="head_dim")
}
MOE_FIELDS = hf.DENSE_SIZES | {
    "num_experts": hf.Field("experts.num_experts", aliases=("num_local_experts",)),
    "num_experts_per_tok": hf.Field("experts.experts_per_token"),
    "moe_intermediate_size": hf.Field("experts.intermediate_dim"),
    "norm_topk_prob": hf.Field("experts.norm_topk_prob", False),
}


def from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a dense `config.json`; defaults are those of transformers."""
    given.only("use_qk_norm", True)
    found = hf.read_decoder(given, FIELDS, kv_heads=32) | hf.read_rotary(given)
    return found | read_later_windows(given, found["num_layers"])


def to_hf(config: Qwen3Config) -> dict[str, Any]:
    """Writes a dense `config.json`."""
    written = hf.write_decoder(config, FIELDS) | hf.write_rotary(config.rotary)
    return written | write_later_windows(config)


def moe_from_hf(given: hf.ConfigFields) -> hf.Found:
    """Reads a `config.json` of experts; defaults are those of transformers."""
    given.only("use_qk_norm", True)
    given.ignore("max_window_layers")
    found = hf.read_decoder(given, MOE_FIELDS, kv_heads=4) | hf.read_rotary(given)
    is_on = given("use_sliding_window", False)
    found |= hf.read_windows(given, found["num_layers"], 4_096, is_on=is_on)
    found |= hf.read_load_balance(given)
    return found | read_dense_layers(given, found["num_layers"])


def moe_to_hf(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Writes a `config.json` of experts."""
    written = hf.write_decoder(config, MOE_FIELDS) | hf.write_rotary(config.rotary)
    window = config.attention.window
    written |= {"sliding_window": window, "use_sliding_window": window is not None}
    return written | write_dense_layers(config) | hf.write_load_balance(config)


def read_dense_layers(given: hf.ConfigFields, num_layers: int) -> hf.Found:
    """The layers without experts."""
    # Qwen3MoeDecoderLayer: every `step`-th layer has experts, unless it is named.
    step, dense = given("decoder_sparse_step", 1) or 1, given("mlp_only_layers", [])
    layers = range(num_layers)
    if strange := [layer for layer in dense if layer not in layers]:
        raise ValueError(
            f"mlp_only_layers names layer {shown(strange[0])}; there are 0 to"
            f" {layers[-1]}."
        )
    is_dense = [layer for layer in layers if layer in dense or (layer + 1) % step]
    return {"experts.dense_layers": is_dense}


def write_dense_layers(config: SparseDecoderConfig) -> dict[str, Any]:
    """The inverse of `read_dense_layers`."""
    dense = [*config.experts.dense_layers]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


register_format(
    HfFormat(
        "qwen3",
        Qwen3Config,
        from_hf,
        to_hf,
        FIELDS,
        probe={"attention": ALTERNATING},
        checksum=-0.21074,
    )
)
register_format(
    HfFormat(
        "qwen3_moe",
        Qwen3MoeConfig,
        moe_from_hf,
        moe_to_hf,
        MOE_FIELDS,
        probe={"attention": ALTERNATING, "experts": ExpertsConfig(dense_layers=(0,))},
        checksum=0.54457,
    )
)
