"""Qwen3: a decoder whose layers each have an MLP, or experts of which every token visits a few."""

from models.qwen3_moe.config import (
    AttentionConfig as AttentionConfig,
    ExpertsConfig as ExpertsConfig,
    LayerKind as LayerKind,
    Qwen3Config as Qwen3Config,
    Qwen3MoeConfig as Qwen3MoeConfig,
    RotaryConfig as RotaryConfig,
)
from models.qwen3_moe.decoder import Qwen3Decoder as Qwen3Decoder
