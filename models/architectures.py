"""Importing this module registers every config, builder and format."""

from models.gpt_oss import GptOssConfig as GptOssConfig
from models.qwen3_moe import Qwen3Config as Qwen3Config, Qwen3MoeConfig as Qwen3MoeConfig
from models.transformer import decoder as decoder  # registers the builder that they share
