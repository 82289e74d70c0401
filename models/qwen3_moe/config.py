"""Configs of Qwen3 decoders, dense and with experts."""

from dataclasses import dataclass

from models.lm import LmConfig
from models.transformer.config import DecoderConfig, SparseDecoderConfig


@LmConfig.register_subclass("qwen3")
@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """A dense Qwen3 decoder: every layer has one MLP."""


@LmConfig.register_subclass("qwen3_moe")
@dataclass(frozen=True)
class Qwen3MoeConfig(SparseDecoderConfig):
    """A Qwen3 decoder with experts in every layer, or in all but some."""
