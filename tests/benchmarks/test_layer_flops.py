"""FLOPs of the layers of hybrid decoders are those of their matrix products, counted by
hand.
"""

import pytest

from benchmarks.layer_flops import flops_of_layer
from models.granitemoehybrid import GraniteMoeHybridConfig
from models.kimi_linear import KimiLinearConfig
from models.lfm2 import Lfm2Config
from models.lfm2_moe import Lfm2MoeConfig
from models.olmo_hybrid import OlmoHybridConfig
from models.parts.mamba2 import MambaConfig
from models.parts.sections import (
    FULL,
    LINEAR,
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    LinearAttentionConfig,
)
from models.qwen3_5 import Qwen3_5Config, Qwen3_5MoeConfig
from models.qwen3_next import Qwen3NextConfig

TOKENS, CHUNK = 128, 64
EMBED, HEADS, KV_HEADS, WIDTH = 16, 4, 2, 8
MLP, EXPERT, SHARED = 24, 6, 10
# Heads of keys and of values, and their widths
KEYS, VALUES, KEY, VALUE = 2, 4, 3, 5

SIZES = dict(
    hidden_dim=EMBED,
    num_layers=2,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    layer_types=(LINEAR, FULL),
    attention=AttentionConfig(head_dim=WIDTH, backend="exact"),
)
LINEAR_SIZES = LinearAttentionConfig(KEYS, VALUES, KEY, VALUE)
# One expert, of whose rows none are padding
EXPERTS = ExpertsConfig(1, 1, EXPERT)
LATENT = LatentConfig(None, 7, plain_dim=4, rotary_dim=2, value_dim=5)
CONFIGS = {
    "qwen3_next": Qwen3NextConfig(
        **SIZES, linear=LINEAR_SIZES, experts=EXPERTS, shared_dim=SHARED
    ),
    "qwen3_5": Qwen3_5Config(**SIZES, linear=LINEAR_SIZES, mlp_dim=MLP),
    "qwen3_5_moe": Qwen3_5MoeConfig(
        **SIZES, linear=LINEAR_SIZES, experts=EXPERTS, shared_dim=SHARED
    ),
    "olmo_hybrid": OlmoHybridConfig(**SIZES, linear=LINEAR_SIZES, mlp_dim=MLP),
    "kimi_linear": KimiLinearConfig(
        **SIZES
        | {"num_kv_heads": HEADS, "attention": AttentionConfig(backend="exact")},
        latent=LATENT,
        linear=LinearAttentionConfig(KEYS, KEYS, VALUE, VALUE),
        experts=EXPERTS,
    ),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **SIZES,
        mamba=MambaConfig(VALUES, KEYS, head_dim=VALUE, state_dim=KEY),
        experts=EXPERTS,
        shared_dim=SHARED,
    ),
    "lfm2": Lfm2Config(**SIZES, mlp_dim=MLP),
    "lfm2_moe": Lfm2MoeConfig(**SIZES, experts=EXPERTS),
}


def linear_map(inputs, outputs):
    return 2 * TOKENS * inputs * outputs


def mlp(inner):
    """Three maps: of the gate, up and down."""
    return 3 * linear_map(EMBED, inner)


def attention(keys, values, projections):
    """Scores of all pairs and the sums of values, and what projects tokens."""
    pairs = TOKENS**2
    return projections + 2 * HEADS * pairs * (keys + values)


def inverse_of_triangle():
    """Of blocks of 16 by four steps of two whole squares; then two products for each
    two blocks that become one.
    """
    inverse = CHUNK // 16 * 4 * 2 * 2 * 16**3
    for size in (16, 32):
        inverse += CHUNK // (2 * size) * 2 * 2 * size**3
    return inverse


def delta_rule(value_heads, key, value, *, by_channel):
    """What `_delta_chunks.py` derives, for all chunks."""
    # Of keys and of queries with keys: a whole square for each head of keys, or for
    # each head of values the halves below the diagonal
    if by_channel:
        squares = 2 * value_heads * CHUNK * (CHUNK - 1) * key
        sums = 0
    else:
        squares = 2 * KEYS * 2 * CHUNK**2 * key
        sums = value_heads * 2 * CHUNK**3
    of_inverse = 2 * CHUNK**2 * (key + value)
    of_states = 3 * 2 * CHUNK * key * value
    of_updates = 2 * CHUNK**2 * value
    of_head = inverse_of_triangle() + of_inverse + of_states + of_updates
    return TOKENS // CHUNK * (squares + sums + value_heads * of_head)


def delta_net():
    keys = 2 * linear_map(EMBED, KEYS * KEY)
    # Values, their gates, and back
    values = 3 * linear_map(EMBED, VALUES * VALUE)
    betas_and_decays = 2 * linear_map(EMBED, VALUES)
    rule = delta_rule(VALUES, KEY, VALUE, by_channel=False)
    return keys + values + betas_and_decays + rule


def kimi_delta_attention():
    """Heads of queries, keys and values alike; gates and decays by way of one head's
    width.
    """
    heads = KEYS * VALUE
    projections = 4 * linear_map(EMBED, heads) + linear_map(EMBED, KEYS)
    low_rank = linear_map(EMBED, VALUE) + linear_map(VALUE, heads)
    return projections + 2 * low_rank + delta_rule(KEYS, VALUE, VALUE, by_channel=True)


def mamba():
    """Without the erasing term: no triangle is inverted."""
    keys = 2 * linear_map(EMBED, KEYS * KEY)
    values = 3 * linear_map(EMBED, VALUES * VALUE)
    steps = linear_map(EMBED, VALUES)
    squares = KEYS * 2 * CHUNK**2 * KEY
    of_states = 2 * 2 * CHUNK * KEY * VALUE
    of_head = 2 * CHUNK**3 + 2 * CHUNK**2 * VALUE + of_states
    return keys + values + steps + TOKENS // CHUNK * (squares + VALUES * of_head)


def latent_attention():
    queries = linear_map(EMBED, HEADS * (4 + 2))
    down = linear_map(EMBED, 7 + 2)
    up = linear_map(7, HEADS * (4 + 5))
    out = linear_map(HEADS * 5, EMBED)
    return attention(4 + 2, 5, queries + down + up + out)


def plain_attention():
    projections = 2 * linear_map(EMBED, HEADS * WIDTH)
    projections += 2 * linear_map(EMBED, KV_HEADS * WIDTH)
    return attention(WIDTH, WIDTH, projections)


def gated_attention():
    return plain_attention() + linear_map(EMBED, HEADS * WIDTH)


ROUTED = linear_map(EMBED, 1) + mlp(EXPERT)
BESIDE_A_SHARED_GATE = ROUTED + mlp(SHARED) + linear_map(EMBED, 1)
CONVOLUTION = 4 * linear_map(EMBED, EMBED)
# The mixers, linear and full, and what follows them
EXPECTED = {
    "qwen3_next": (delta_net(), gated_attention(), BESIDE_A_SHARED_GATE),
    "qwen3_5": (delta_net(), gated_attention(), mlp(MLP)),
    "qwen3_5_moe": (delta_net(), gated_attention(), BESIDE_A_SHARED_GATE),
    "olmo_hybrid": (delta_net(), plain_attention(), mlp(MLP)),
    # Of a shared expert as wide as the others
    "kimi_linear": (kimi_delta_attention(), latent_attention(), ROUTED + mlp(EXPERT)),
    "granitemoehybrid": (mamba(), plain_attention(), ROUTED + mlp(SHARED)),
    "lfm2": (CONVOLUTION, plain_attention(), mlp(MLP)),
    "lfm2_moe": (CONVOLUTION, plain_attention(), ROUTED),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_of_hybrids_are_those_counted_by_hand(name):
    config = CONFIGS[name]
    linear, full, feed_forward = EXPECTED[name]
    kinds = [config.kind_of(number) for number in range(2)]
    found = [flops_of_layer(config, kind, TOKENS) for kind in kinds]
    assert found == [linear + feed_forward, full + feed_forward]
