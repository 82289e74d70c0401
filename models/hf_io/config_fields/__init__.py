"""The fields of a `config.json` in Hugging Face's format, as they are read and written.

An architecture has a table of them, `Fields`. Each entry says in one place what a field
is read into, its default in transformers, and what is written of it, so that the two
directions agree. An architecture whose fields depend on each other has functions
besides, which begin with `read_decoder` and `write_decoder`. A field that was not read
gives a warning; those that are known to change what a model computes are refused.
"""

from models.hf_io.config_fields.entries import (
    Entry as Entry,
    Field as Field,
    Fields as Fields,
    Ignored as Ignored,
    KeyValueHeads as KeyValueHeads,
    LoadBalance as LoadBalance,
    NoPadding as NoPadding,
    Only as Only,
    ignored as ignored,
    in_sections as in_sections,
    read_decoder as read_decoder,
    with_defaults as with_defaults,
    without as without,
    write_decoder as write_decoder,
)
from models.hf_io.config_fields.given import (
    ConfigFields as ConfigFields,
    Found as Found,
)
from models.hf_io.config_fields.layers import (
    DensePrefix as DensePrefix,
    HybridLayers as HybridLayers,
    LayerNumbers as LayerNumbers,
    Windows as Windows,
    check_length as check_length,
    check_names as check_names,
    layer_types as layer_types,
    read_numbers as read_numbers,
    read_rotated as read_rotated,
    read_windows as read_windows,
)
from models.hf_io.config_fields.rotary import (
    Rotary as Rotary,
    RotaryByKind as RotaryByKind,
)
from models.hf_io.config_fields.sizes import (
    DENSE_SIZES as DENSE_SIZES,
    FURTHER_TOKENS as FURTHER_TOKENS,
    LATENT_SIZES as LATENT_SIZES,
    LINEAR_SIZES as LINEAR_SIZES,
    SIZES as SIZES,
)
