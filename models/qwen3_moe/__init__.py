"""Qwen3 mixture-of-experts: a decoder whose layers each route every token to a few SwiGLU experts."""

from models.qwen3_moe.config import ExpertsConfig as ExpertsConfig, Qwen3MoeConfig as Qwen3MoeConfig
from models.qwen3_moe.decoder import Qwen3MoeDecoder as Qwen3MoeDecoder
