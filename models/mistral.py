"""Mistral (Jiang et al. 2023): a Llama with a window in all layers or in none."""

from dataclasses import dataclass

from models.decoder.config import DecoderConfig
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """A Mistral decoder."""


FIELDS = {
    **hf.DECODER_FIELDS,
    "num_key_value_heads": hf.kv_heads(8),
    "attention_bias": hf.only(False),
    "rotary": hf.rope(longest=131_072),
    "windows": hf.windows(4_096),
}

register_format(HfFormat("mistral", MistralConfig, FIELDS))
