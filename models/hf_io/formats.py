"""The registry of architectures in Hugging Face's formats; the file of each registers
it.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from models.hf_io.config_fields import (
    ConfigFields,
    Field,
    Fields,
    Found,
    in_sections,
    layer_types,
    read_decoder,
    write_decoder,
)
from models.hf_io.safetensors_folder import WeightsError, read_json
from models.hf_io.stacked_weights import ExpertsTensor, HeadsTensor
from models.parts.config import DecoderConfig
from models.parts.hybrid import HybridDecoderConfig
from models.parts.sections import FULL, SLIDING, AttentionConfig, MtpConfig
from stacked_remat._messages import shortened, shown
from stacked_remat.training.config_file import decode_config
from stacked_remat.training.config_sections import written_keys
from stacked_remat.training.errors import ConfigError

GENERATION_CONFIG = "generation_config.json"
TensorTable: TypeAlias = Mapping[str, str | ExpertsTensor | HeadsTensor]

DECODER_TENSORS: TensorTable = {
    "embedding": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention": "self_attn",
    # Of latent attention; the second is of the vector and one key for all heads
    "attention.q_a_norm": "q_a_layernorm",
    "attention.kv_a_proj": "kv_a_proj_with_mqa",
    "attention.kv_a_norm": "kv_a_layernorm",
    "mlp.router": "gate",
    "mlp.bias": "",
    "mlp.bias.value": "gate.e_score_correction_bias",
    "mlp.shared": "shared_experts",
    "linear_attention": "linear_attn",
    "linear_attention.decay": "",
    "linear_attention.decay.a_log": "A_log",
    "linear_attention.q_conv": "conv1d",
    "linear_attention.k_conv": "conv1d",
    "linear_attention.v_conv": "conv1d",
    # Of Mamba-2, whose projections are one tensor, and its convolutions another
    "mamba.gate_proj": "in_proj",
    "mamba.v_proj": "in_proj",
    "mamba.k_proj": "in_proj",
    "mamba.q_proj": "in_proj",
    "mamba.dt_proj": "in_proj",
    "mamba.v_conv": "conv1d",
    "mamba.k_conv": "conv1d",
    "mamba.q_conv": "conv1d",
    "mamba.step": "",
    "mamba.step.a_log": "A_log",
    "mamba.step.d": "D",
    "mamba.o_proj": "out_proj",
}
"""The names that most architectures have, of parts that they have."""


NUMBERED_EXPERTS = {
    "mlp.experts.gate_proj": "w1",
    "mlp.experts.up_proj": "w3",
    "mlp.experts.down_proj": "w2",
}
"""Names of the maps of an expert in some files: w2 is back to the residual stream."""


SEPARATE_CONVOLUTIONS = {
    "linear_attention.q_conv": "q_conv1d",
    "linear_attention.k_conv": "k_conv1d",
    "linear_attention.v_conv": "v_conv1d",
    "linear_attention.norm": "o_norm",
}
"""Names in linear attention where each convolution has a tensor."""
JOINED_CONVOLUTIONS = dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d")
"""For `HfFormat.loaded`: transformers has them in one tensor in memory."""


ALTERNATING = AttentionConfig(window=3, layer_types=(FULL, SLIDING))
"""For `HfFormat.probe`: layers with a window and without one."""


FURTHER_LAYERS: Mapping[str, str] = {
    "layer": "model.layers.{}",
    "embedding_norm": "model.layers.{}.enorm",
    "hidden_norm": "model.layers.{}.hnorm",
    "eh_proj": "model.layers.{}.eh_proj",
    "norm": "model.layers.{}.shared_head.norm",
    "embedding": "model.layers.{}.embed_tokens",
    "head": "model.layers.{}.shared_head.head",
}
"""For `HfFormat.further`: layers that are numbered after the others."""


@dataclass(frozen=True)
class HfFormat:
    """An architecture in Hugging Face's files.

    Attributes:
        model_type: its name in `config.json`, and in configs.
        fields: those of its `config.json`, but for `vocab_size`.
        tensors: names of the parts of a decoder in the names of tensors, by the part's
            path in the decoder or in a layer (`attention.q_proj`), where they differ
            from those of `DECODER_TENSORS`, or where that has none, from the
            attribute's name; empty for a part whose name is in none. And by the path of
            an expert's array (`mlp.experts.down_proj.weight`) the tensor that holds
            those of all. Linear maps with one name share its tensors, which have their
            outputs in the order of the attributes, or with a `HeadsTensor` head by
            head.
        loaded: parts of names, with dots in them or not, that transformers has
            otherwise in memory, as adapters have them.
        joined: by a part of a name in memory, those of the files' tensors that are one
            there, joined along their first axis; `loaded` gives them this name.
        also_read: parts of names that some files have for others, which are written.
        shapes: by the path of an array the shape of its tensor, where that has axes of
            size 1; -1 for the other one.
        is_loaded: whether names are those of transformers' model in memory.
        quant_methods: the `quant_method`s of `quantization_config` whose tensors are
            read.
        further_layers: whether files may have layers after the last, which predict
            further tokens, and are not read.
        further: the names of the parts of such layers, where they are read: of the
            attributes of `models.parts.multi_token_prediction.MtpLayer`, whose `layer`
            has the names of other layers below its own, and of the copies of the
            decoder's embedding and head that each has.
        not_read: how the names of other tensors begin that files may have and this
            decoder does not.
        from_hf: reads a `config.json` where the table does not say all; None for
            `read_decoder`.
        to_hf: writes one; None for `write_decoder`.
        probe: fields of the config whose checksum is recorded: those that have no
            effect by default, such as a factor of 1, and what gives layers of each
            kind.
        checksum: what `models.hf_io.wiring.checksum` gave for this config when the
            decoder agreed with transformers; None for no check in exports.
    """

    model_type: str
    config_class: type[DecoderConfig]
    fields: Fields
    tensors: TensorTable = field(default_factory=dict)
    loaded: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    also_read: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    is_loaded: bool = False
    quant_methods: tuple[str, ...] = ()
    further_layers: bool = False
    further: Mapping[str, str] = field(default_factory=dict)
    not_read: tuple[str, ...] = ()
    from_hf: Callable[[ConfigFields], Found] | None = None
    to_hf: Callable[[Any], dict[str, Any]] | None = None
    probe: Mapping[str, Any] = field(default_factory=dict)
    checksum: float | None = None

    def read_config(self, given: ConfigFields) -> Found:
        """Reads the fields of a `config.json`."""
        if self.from_hf is not None:
            return self.from_hf(given)
        return read_decoder(given, self.fields)

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """Writes the fields of a `config.json`."""
        if self.to_hf is not None:
            return self.to_hf(config)
        return write_decoder(config, self.fields)

    def name_of(self, path: str) -> str:
        """What a part is called in the names of tensors, without those around it."""
        own = path.rpartition(".")[-1]
        name = self.tensors.get(path, DECODER_TENSORS.get(path, own))
        if isinstance(name, HeadsTensor):
            return name.name
        assert isinstance(name, str)
        return name

    def head_axes_of(self, path: str) -> int:
        """How many output axes of a linear map are the heads by which it shares a
        tensor; 0 if it does not.
        """
        name = self.tensors.get(path)
        return name.head_axes if isinstance(name, HeadsTensor) else 0

    @property
    def fused(self) -> Mapping[str, ExpertsTensor]:
        """The tensors that hold all experts of a layer; empty where every expert has
        its own.
        """
        return {
            path: name
            for path, name in self.tensors.items()
            if isinstance(name, ExpertsTensor)
        }

    @property
    def in_memory(self) -> "HfFormat":
        """The names of transformers 5's model in memory, where each layer's experts are
        fused.

        Some training code writes its files so. In `gate_up_proj` gate is before up.
        """
        tensors = {**self.tensors}
        if not self.fused:
            tensors |= {
                "mlp.experts.gate_proj.weight": ExpertsTensor("gate_up_proj"),
                "mlp.experts.up_proj.weight": ExpertsTensor("gate_up_proj"),
                "mlp.experts.down_proj.weight": ExpertsTensor("down_proj"),
            }
        return dataclasses.replace(self, tensors=tensors, is_loaded=True)

    def tensor_name(self, name: str) -> str:
        """The name of a tensor that a file calls `name`."""
        return self.loaded_name(name) if self.is_loaded else name

    def loaded_name(self, name: str) -> str:
        """What transformers calls a tensor or module of a file in memory, and of a
        model in memory too.
        """
        return _with_parts_renamed(name, self.loaded)

    def read_name(self, name: str) -> str:
        """What a tensor is called that a file has under this name."""
        return _with_parts_renamed(name, self.also_read)


def _with_parts_renamed(name: str, parts: Mapping[str, str]) -> str:
    whole = f".{name}."
    for before, after in parts.items():
        whole = whole.replace(f".{before}.", f".{after}.")
    return whole[1:-1]


_FORMATS: dict[str, HfFormat] = {}
_NAMES = {
    "num_kv_heads": "num_key_value_heads",
    "attention.window": "sliding_window",
    "attention.layer_types": "layer_types",
}
"""Fields that are not read as they are, by the path of their attribute."""


def register_format(known: HfFormat, *also: str) -> None:
    """Registers an architecture for `model.type` of configs, and for folders, which may
    have other names.
    """
    DecoderConfig.register_subclass(known.model_type)(known.config_class)
    _FORMATS.update(dict.fromkeys((known.model_type, *also), known))


def registered() -> Mapping[str, HfFormat]:
    """The format of each name that folders have."""
    return _FORMATS


def format_of(config: DecoderConfig) -> HfFormat:
    """The format of a decoder's config."""
    for one in _FORMATS.values():
        if one.config_class is type(config):
            return one
    raise WeightsError(
        f"No Hugging Face format is registered for {type(config).__name__}."
    )


def read_hf_config(root: Path) -> tuple[DecoderConfig, int]:
    """The architecture of a folder in Hugging Face's format, and the number of rows of
    its embedding.
    """
    path = root / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{root} has no config.json, as beside weights, no adapter_config.json, as"
            " of adapters, and no checkpoints/, as in a run folder: name that for one"
            " of its checkpoints, and the --step."
        )
    document = read_json(path)
    try:
        return config_from_hf(document, str(path))
    except ValueError as error:
        raise WeightsError(f"{path} can't be used: {error}") from error


def config_from_hf(
    document: Mapping[str, Any], place: str = "config.json"
) -> tuple[DecoderConfig, int]:
    """The architecture that a `config.json` describes, and its vocabulary's size.

    A field that is not known gives a warning; one that is missing or has an unsupported
    value, a ValueError.
    """
    document = _text_fields(document)
    given = ConfigFields(document)
    model_type = given("model_type", "")
    if model_type not in _FORMATS:
        raise ValueError(
            f"model_type is {shown(model_type)}; {', '.join(sorted(_FORMATS))} are"
            " read."
        )
    known = _FORMATS[model_type]
    method = given("quantization_config", {}).get("quant_method", "none")
    # The tensors say which of them are quantized.
    if method not in ("none", *known.quant_methods):
        supported = " or ".join(map(repr, known.quant_methods)) or "None"
        raise ValueError(
            f"quant_method is {shown(method)}; only {supported} is supported. Name the"
            " model that was quantized: trainer.precision.frozen stores its weights in"
            " 8 or 4 bits."
        )
    vocab_size = given("vocab_size", kind=int)
    if vocab_size is None:
        raise ValueError("vocab_size is missing.")
    try:
        found = known.read_config(given)
    # Of zeros, and of values in sections.
    except (ArithmeticError, AttributeError, TypeError) as error:
        name, value = given.latest
        raise ValueError(
            f"{name} is {shown(value)}: this can't be used, or a field that goes with"
            f" it ({error})."
        ) from error
    given.check_left(model_type, place)
    # Files have the width of an MLP also where no layer has one.
    if not found.get("experts.dense_layers", True):
        found["mlp_dim"] = None
    tree = in_sections(found)
    try:
        config = decode_config(known.config_class, tree, "in config.json")
    except ConfigError as error:
        fields = known.fields.items()
        names = {one.path: name for name, one in fields if isinstance(one, Field)}
        names |= _NAMES
        # Users know the fields of the file, not the attributes that they are read into.
        text = re.sub(
            r"(?:model\.)?([a-z]\w*(?:\.[a-z]\w*)*)",
            lambda at: names.get(at[1], at[0]),
            str(error),
        )
        raise ValueError(text) from error
    return config, vocab_size


def _text_fields(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a text decoder, which may be a section of those of a model that
    reads images too.
    """
    section = document.get("text_config")
    if not isinstance(section, dict) or section.get("model_type") not in _FORMATS:
        return document
    around = ("tie_word_embeddings", "quantization_config")
    return {name: document[name] for name in around if name in document} | section


def config_to_hf(
    config: DecoderConfig, vocab_size: int, *, dtype: str
) -> dict[str, Any]:
    """The `config.json` of a decoder, as `AutoModelForCausalLM` of transformers 4.51
    and later reads it.
    """
    known = format_of(config)
    document = {
        "model_type": known.model_type,
        "architectures": [
            f"{known.config_class.__name__.removesuffix('Config')}ForCausalLM"
        ],
        "vocab_size": vocab_size,
        "torch_dtype": dtype,
    }
    # Read again below: what comes back differs in what `config.json` can't say.
    document |= known.write_config(config)
    again, _ = config_from_hf(document)
    # Layers that predict further tokens are there or not by their weight.
    again = _with_fields_of_run(again, config, {"mtp.weight"})
    if differing := differing_fields("model", written_out(config), written_out(again)):
        raise WeightsError(
            f"Hugging Face's {known.model_type} can't have this decoder; its"
            " config.json has no such"
            f" {shortened([line.partition(':')[0] for line in differing])}."
        )
    return document


def why_not_exported(config: DecoderConfig, vocab_size: int | None) -> str | None:
    """What of a config `config.json` can't say; None where it can say all."""
    try:
        config_to_hf(config, vocab_size or 1, dtype="float32")
    except ValueError as error:
        return str(error)
    return None


def differing_fields(path: str, config: object, found: object) -> list[str]:
    """A line for each field in which two configs differ, but for those that a run
    decides.
    """
    if isinstance(config, DecoderConfig) and type(config) is not type(found):
        own, other = (
            DecoderConfig.get_choice_name(type(one)) for one in (config, found)
        )
        return [f"{path}.type: {own} in the config, {other} in the folder"]
    if type(config) is not type(found) or not dataclasses.is_dataclass(config):
        same = config == found
        return (
            []
            if same
            else [f"{path}: {config!r} in the config, {found!r} in the folder"]
        )
    lines = []
    for one in dataclasses.fields(config):
        if "of_run" not in one.metadata:
            own = getattr(config, one.name)
            other = getattr(found, one.name)
            lines += differing_fields(f"{path}.{one.name}", own, other)
    return lines


def says_nothing(config: DecoderConfig) -> bool:
    """Whether a config says nothing of what a folder decides but its type and a longer
    context.

    A config says what is written in it, by a file or as an argument in Python, also
    where it is the default.
    """
    # Of a longer context the rotary section is said, and not the architecture.
    lengthens = config.rotary.scaling is not None
    said = [
        key for key in written_keys(config) - {"type"} if _is_of_folder(config, key)
    ]
    return all(lengthens and key.startswith("rotary.") for key in said)


def unlike_folder(config: DecoderConfig, found: DecoderConfig) -> list[str]:
    """A line for each field in which the `model` that was written is not the one that a
    folder has.
    """
    written = written_keys(config)
    theta = config.rotary.theta
    if not says_nothing(config):
        lines = differing_fields("model", written_out(config), written_out(found))
        return [_with_source(line, written) for line in lines]
    if type(config) is not type(found) and "type" in written:
        return differing_fields("model", config, found)
    if "rotary.theta" not in written:
        return []
    return differing_fields("model.rotary.theta", theta, found.rotary.theta)


def _with_source(line: str, written: Collection[str]) -> str:
    """A line of `differing_fields`, which says of a key that is not written that it has
    its default.
    """
    key = line.partition(":")[0].removeprefix("model.")
    # A section, such as a scaling, may be written by keys below it.
    is_written = any(f"{one}.".startswith(f"{key}.") for one in written)
    default = " by default, "
    return line if is_written else line.replace(" in the config, ", default, 1)


def _is_of_folder(config: Any, key: str) -> bool:
    """Whether the folder of its weights decides a dotted key of a config, and not the
    run.
    """
    name, _, below = key.partition(".")
    is_of_run = any(
        one.name == name and "of_run" in one.metadata
        for one in dataclasses.fields(config)
    )
    value = getattr(config, name)
    # A section is the folder's as far as a key in it is.
    has_keys = below and dataclasses.is_dataclass(value)
    return not is_of_run and (not has_keys or _is_of_folder(value, below))


def written_out(config: DecoderConfig) -> DecoderConfig:
    """The config with sizes and windows written out, and without layers that it does
    not train, so that equal decoders have equal configs.
    """
    types = layer_types(config)
    attention = dataclasses.replace(
        config.attention,
        head_dim=config.head_dim,
        window=config.attention.window if SLIDING in types else None,
        layer_types=tuple(types) if SLIDING in types else None,
    )
    has_mlp = any(not kind.sparse for kind in config.kinds.values())
    changes: dict[str, Any] = {"mlp_dim": config.Mlp.size if has_mlp else None}
    if isinstance(config, HybridDecoderConfig):
        changes["layer_types"] = config.types_of_layers
    if not config.further_tokens.trained_depths and config.further_tokens.depths:
        changes["mtp"] = MtpConfig()
    return dataclasses.replace(config, attention=attention, **changes)


def pretrained_config(config: DecoderConfig, found: DecoderConfig) -> DecoderConfig:
    """The architecture found, with what a run decides (`OF_RUN`) and a longer context
    of `config`.
    """
    written = written_keys(config)
    longest = found.rotary.max_position_embeddings
    found = _with_fields_of_run(found, config, written)
    if (
        config.rotary.scaling is not None
    ):  # a longer context than the folder was made for
        rotary = dataclasses.replace(config.rotary, theta=found.rotary.theta)
        if "rotary.max_position_embeddings" not in written:
            rotary = dataclasses.replace(rotary, max_position_embeddings=longest)
        found = dataclasses.replace(found, rotary=rotary)
    return found


def _with_fields_of_run(
    found: Any, config: object, written: Collection[str], section: str = ""
) -> Any:
    """The config found, with the fields of the run that are written in `config`."""
    changes = {}
    for entry in dataclasses.fields(found):
        name = entry.name
        key = section + entry.name
        of_config = getattr(config, name, None)
        of_found = getattr(found, name)
        if "of_run" in entry.metadata:
            if key in written and of_config is not None:
                changes[name] = of_config
        elif dataclasses.is_dataclass(of_config) and dataclasses.is_dataclass(of_found):
            changes[name] = _with_fields_of_run(of_found, of_config, written, f"{key}.")
    return dataclasses.replace(found, **changes)


def end_tokens(root: Path, num_tokens: int) -> tuple[int, ...]:
    """The tokens that end a text; a chat model has several, and a folder may name none.

    As in transformers, `eos_token_id` is read from `generation_config.json`, else from
    `config.json`.
    """
    for path in (root / GENERATION_CONFIG, root / "config.json"):
        ends = read_json(path).get("eos_token_id") if path.is_file() else None
        if ends is None:
            continue
        tokens = ends if isinstance(ends, list) else [ends]
        if not all(token in range(num_tokens) for token in tokens):
            raise WeightsError(
                f"{path}: eos_token_id is {shown(ends)}; the model has {num_tokens}"
                " tokens."
            )
        return tuple(tokens)
    return ()
