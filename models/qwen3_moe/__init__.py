"""Qwen3 and Qwen3 MoE: their configs, and their names in Hugging Face's files."""

from models.qwen3_moe.config import Qwen3Config as Qwen3Config, Qwen3MoeConfig as Qwen3MoeConfig
from models.qwen3_moe.hf import TENSOR_NAMES as TENSOR_NAMES  # registers both
