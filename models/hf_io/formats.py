"""The registry of architectures in Hugging Face's formats: each package of `models` registers its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from models.hf_io.config_fields import ConfigFields, decoder_fields
from models.hf_io.safetensors_folder import WeightsError, read_json
from models.hf_io.stacked_weights import FusedTensor
from models.transformer.config import DecoderConfig
from stacked_remat._messages import shown
from stacked_remat.lora import PeftNames

ExpertsLayout: TypeAlias = Literal["fused", "separate"]
"""How adapters of experts are written: `fused`, as PEFT writes them for transformers 5, whose experts are two
parameters (`target_parameters`), or `separate`, a pair of tensors for every expert, as for transformers 4."""


@dataclass(frozen=True)
class HfFormat:
    """What Hugging Face's files call the parts of one architecture.

    Attributes:
        model_type: its name in `config.json`.
        config_class: of its decoders.
        read_config: makes the config from the arguments of `DecoderConfig` that all architectures share and
            the fields that are left; raises `ValueError` for a value that is not supported.
        write_config: the fields of `config.json` that are this architecture's own; raises `WeightsError` for
            a config that this format can't express.
        tensor_names: names of the parts of a decoder, where they differ from the attribute's name: of
            `embedding`, `layers`, `norm` and `head`, and of a layer's attributes (`experts`).
        peft_names: names of the adapters of a decoder.
        fused_tensors: the tensors that hold all experts of a layer, by what a single expert's tensor would be
            called (`down_proj.weight`); empty where every expert has its own.
        defaults: values of the fields that all architectures share where they are absent, for those that
            differ from other architectures'; see `ConfigFields.decoder`.
        quant_methods: the `quant_method`s of `quantization_config` whose tensors are read.
    """

    model_type: str
    config_class: type[DecoderConfig]
    read_config: Callable[[ConfigFields, dict[str, Any]], DecoderConfig]
    write_config: Callable[[Any], dict[str, Any]]
    tensor_names: Mapping[str, str]
    peft_names: Callable[[DecoderConfig, ExpertsLayout], PeftNames]
    fused_tensors: Mapping[str, FusedTensor] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    quant_methods: tuple[str, ...] = ()

    def experts_layout(self, tensor: str) -> ExpertsLayout | None:
        """The layout of experts that the name of a tensor shows; None where it is not of experts."""
        _, found, rest = tensor.partition(f".{self.tensor_names.get('experts', 'experts')}.")
        return None if not found else "separate" if rest.partition(".")[0].isdecimal() else "fused"


_FORMATS: dict[str, HfFormat] = {}
_NONE = "no architecture is registered: import models.architectures"


def register_format(*formats: HfFormat) -> None:
    """Registers formats for reading and writing."""
    _FORMATS.update({one.model_type: one for one in formats})


def format_of(config: DecoderConfig) -> HfFormat:
    """The format of a decoder's config.

    Raises:
        WeightsError: none is registered.
    """
    for one in _FORMATS.values():
        if one.config_class is type(config):
            return one
    which = f"No Hugging Face format is registered for {type(config).__name__}" if _FORMATS else _NONE
    raise WeightsError(f"{which}.")


def read_hf_config(root: Path) -> tuple[DecoderConfig, int]:
    """The architecture of a folder in Hugging Face's format, and the number of rows of its embedding.

    Raises:
        FileNotFoundError: there is no `config.json`.
        WeightsError: it is not valid JSON, of an unknown architecture, or asks for something unsupported.
    """
    path = root / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"There is no config.json in {root}; it describes the weights beside it.")
    document = read_json(path)
    try:
        return config_from_hf(document)
    except ValueError as error:
        raise WeightsError(f"{path} can't be used: {error}") from error


def config_from_hf(document: Mapping[str, Any]) -> tuple[DecoderConfig, int]:
    """The architecture that a `config.json` describes, and its vocabulary's size.

    Raises:
        ValueError: an unknown `model_type`; a field that is missing, unknown, or has an unsupported value.
    """
    fields = ConfigFields(document)
    model_type = fields("model_type", None)
    if not isinstance(model_type, str) or model_type not in _FORMATS:
        readable = f"{', '.join(sorted(_FORMATS))} are read" if _FORMATS else _NONE
        raise ValueError(f"model_type is {shown(model_type)}; {readable}.")
    known = _FORMATS[model_type]
    fields.check_quantization(known.quant_methods)
    shared, vocab_size = fields.decoder(known.defaults), fields.size("vocab_size")
    config = known.read_config(fields, shared)
    fields.check_unknown(model_type)
    return config, vocab_size


def config_to_hf(config: DecoderConfig, vocab_size: int, *, dtype: str) -> dict[str, Any]:
    """The `config.json` of a decoder, as `AutoModelForCausalLM` of transformers 4.51 and later reads it.

    Raises:
        WeightsError: no format is registered for it, or this can't express it.
    """
    found = format_of(config)
    own = found.write_config(config)
    return {"model_type": found.model_type, **decoder_fields(config, vocab_size, dtype=dtype), **own}
