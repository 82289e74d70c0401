"""Registers Qwen3 and Qwen3 MoE among Hugging Face's formats."""

from models.hf_io.formats import HfFormat, register_format
from models.qwen3_moe.config import Qwen3Config, Qwen3MoeConfig
from models.qwen3_moe.hf_config import read_dense, read_sparse, write_dense, write_sparse
from models.qwen3_moe.peft import peft_names

TENSOR_NAMES = {
    "embedding": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "router": "gate",
}
"""Hugging Face's names of the parts of a decoder, where they differ from the attribute's name."""

register_format(
    HfFormat("qwen3", Qwen3Config, read_dense, write_dense, TENSOR_NAMES, peft_names),
    HfFormat("qwen3_moe", Qwen3MoeConfig, read_sparse, write_sparse, TENSOR_NAMES, peft_names),
)
