"""Llama 2 and 3 (Dubey et al. 2024, "The Llama 3 Herd of Models"): the decoder from
which others differ.
"""

from dataclasses import dataclass

from models.decoder.config import DecoderConfig
from models.hf_io import config_fields as hf
from models.hf_io.formats import HfFormat, register_format


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """A Llama decoder."""


FIELDS = {**hf.DECODER_FIELDS, "rotary": hf.rope(longest=2_048)}

register_format(HfFormat("llama", LlamaConfig, FIELDS))
