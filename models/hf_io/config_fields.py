"""The fields of a `config.json` in Hugging Face's format, as they are read and written.

An architecture has two functions: one reads `ConfigFields` into `Found`, the other
writes the fields of a config. What several share is here. A field that was not read
gives a warning; those that are known to change what a model computes are refused.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from models.parts.config import DecoderConfig, SparseDecoderConfig
from models.parts.hybrid import HybridDecoderConfig
from models.parts.sections import FULL, LINEAR, SLIDING, RotaryConfig
from stacked_remat._messages import printable, shortened, shown
from stacked_remat.ops import DefaultRotary, RotaryScaling, rotary_from_hf, rotary_to_hf

_WITHOUT_EFFECT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash
    _experts_implementation _name_or_path _sliding_window_pattern architectures auto_map
    bos_token_id cache_implementation do_sample dtype eos_token_id ep_size
    finetuning_task id2label initializer_range is_decoder is_encoder_decoder label2id
    max_length name_or_path output_attentions output_hidden_states output_router_logits
    pad_token_id pretraining_tp problem_type return_dict task_specific_params
    temperature tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    unsloth_version use_bfloat16 use_cache
    """.split()
)
"""Fields that do not change logits; some are read all the same, such as `eos_token_id`
for generation.

`pad_token_id` does change a gradient: transformers gives its embedding none. Here
weights and documents mark padding, and a token that occurs in the text is trained.
"""

_MUST_BE_OFF = frozenset(
    """
    add_cross_attention alibi attention_chunk_size attn_logit_softcapping
    chunk_size_feed_forward clip_qkv cross_attention_hidden_size final_logit_softcapping
    kv_lora_rank logit_softcap mlp_bias n_shared_experts no_rope_layers
    num_kv_shared_layers parallel_attn pruned_heads q_lora_rank qkv_bias
    router_jitter_noise shared_expert_intermediate_size tie_encoder_decoder
    use_bidirectional_attention use_qk_norm
    """.split()
)
_MUST_BE_ONE = frozenset(
    """
    attention_multiplier embedding_multiplier logit_scale logits_scaling
    partial_rotary_factor residual_multiplier rotary_pct
    """.split()
)
"""Fields that change logits: other values are refused, unless the architecture reads
them.
"""

Found: TypeAlias = dict[str, Any]
"""Values that were read, by the path of the attribute of the config:
`attention.window`.
"""


class ConfigFields:
    """The fields of a `config.json`; reading one removes it, so that the unknown ones
    are left over.

    A field that is absent or null has its default, unless null means something else.

    Attributes:
        document: all fields.
        latest: the name and value of what was read last.
    """

    def __init__(self, document: Mapping[str, Any]):
        self.document, self._left = document, dict(document)
        self.latest: tuple[str, Any] = ("", None)

    def __call__(
        self, name: str, default: Any = None, kind: Any = None, null: Any = ...
    ) -> Any:
        """The field, which has the type `kind` or that of its default; the default, or
        `null`.
        """
        # Removed, so that what no architecture reads is left over.
        is_absent, value = name not in self._left, self._left.pop(name, None)
        if value is None:
            return default if is_absent or null is ... else null
        self.latest = name, value
        kind = kind or (object if default is None else type(default))
        if not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{name} must be {kind.__name__}, got {shown(value)}.")
        return value

    def ignore(self, *names: str) -> None:
        """Fields of any value, which change nothing here."""
        for name in names:
            self(name)

    def only(self, name: str, *supported: Any) -> None:
        """Raises ValueError for a field that has another value than those supported,
        which mean the same.
        """
        value = self(name)
        if value not in (None, *supported):
            raise ValueError(
                f"{name} is {shown(value)}; only {shown(supported[0])} is supported."
            )

    def check_left(self, model_type: str, place: str) -> None:
        """Refuses fields that change the model and were not read, and warns of others
        that are unknown.
        """
        left = {
            name: value
            for name, value in self._left.items()
            if value not in (None, False, [], {})
        }
        for name in sorted(left.keys() & _MUST_BE_ONE):
            self.only(name, 1)
        for name in sorted(left.keys() & _MUST_BE_OFF):
            raise ValueError(f"{name} is {shown(left[name])}; this is not supported.")
        known = _WITHOUT_EFFECT | _MUST_BE_ONE | _MUST_BE_OFF
        if unknown := [printable(name) for name in sorted(left.keys() - known)]:
            warnings.warn(
                f"{place} has {shortened(unknown)}: unknown fields of a {model_type}"
                " decoder, which are not used. Check that they do not change what the"
                " model computes.",
                stacklevel=3,
            )


@dataclass(frozen=True)
class Field:
    """A field that is an attribute of the config.

    Attributes:
        path: of the attribute: `attention.window`.
        default: where the field is absent or null, as in transformers; `...` if it may
            not be.
        aliases: other names that are read.
        written: the path of what is written, where it is another.
    """

    path: str
    default: Any = ...
    aliases: tuple[str, ...] = ()
    written: str = ""


Fields: TypeAlias = dict[str, Field]
"""By the names of fields."""

SIZES: Fields = {
    "hidden_size": Field("hidden_dim"),
    "num_hidden_layers": Field("num_layers"),
    "num_attention_heads": Field("num_heads"),
    "head_dim": Field("attention.head_dim", None, written="head_dim"),
    "attention_bias": Field("attention.bias", False),
    "rms_norm_eps": Field("rms_norm_eps", 1e-6),
    "initializer_range": Field("initializer_range", 0.02),
    "tie_word_embeddings": Field("tie_word_embeddings", False),
}
"""Those that most decoders have."""
DENSE_SIZES: Fields = SIZES | {
    "intermediate_size": Field("mlp_dim", written="Mlp.size")
}
"""The same, with that of an MLP."""

LINEAR_SIZES: Fields = {
    "linear_num_key_heads": Field("linear.num_key_heads", 16),
    "linear_num_value_heads": Field("linear.num_value_heads", 32),
    "linear_key_head_dim": Field("linear.key_dim", 128),
    "linear_value_head_dim": Field("linear.value_dim", 128),
    "linear_conv_kernel_dim": Field("linear.conv_size", 4),
}
"""Those of layers with linear attention."""


FURTHER_TOKENS: Fields = {
    "num_nextn_predict_layers": Field(
        "mtp.depths", 0, ("num_mtp_layers",), written="mtp.trained_depths"
    )
}
"""The number of layers that predict further tokens, which are files' own: transformers
has none.
"""


def without(fields: Fields, *names: str) -> Fields:
    """The fields but for some."""
    return {name: field for name, field in fields.items() if name not in names}


def read_fields(given: ConfigFields, fields: Fields) -> Found:
    """Reads the fields that are attributes of the config."""
    found = Found()
    for name, field in fields.items():
        kind = int if field.default is ... else object  # of sizes, which are needed
        values = [given(one, kind=kind) for one in (name, *field.aliases)]
        values = [value for value in values if value is not None]
        if not values and field.default is ...:
            raise ValueError(f"{name} is missing.")
        found[field.path] = values[0] if values else field.default
    return found


def write_fields(config: DecoderConfig, fields: Fields) -> dict[str, Any]:
    """The inverse of `read_fields`."""
    written = {}
    for name, field in fields.items():
        parts = (field.written or field.path).split(".")
        written[name] = functools.reduce(getattr, parts, config)
    return written


def read_decoder(
    given: ConfigFields,
    fields: Fields,
    kv_heads: int | None = None,
    activations: Sequence[str] = ("silu", "swish"),
) -> Found:
    """Reads `fields`, and others that most decoders have.

    Args:
        kv_heads: `num_key_value_heads` where it is absent; None for all heads.
        activations: the names that the activation of MLPs may have.
    """
    found = read_fields(given, fields)
    every = found["num_heads"]
    found["num_kv_heads"] = given("num_key_value_heads", kv_heads or every, null=every)
    given.only("hidden_act", *activations)
    given.only("attention_dropout", 0)
    return found


def write_decoder(
    config: DecoderConfig,
    fields: Fields,
    activation: Mapping[str, str] = MappingProxyType({"hidden_act": "silu"}),
) -> dict[str, Any]:
    """The inverse of `read_decoder`; `activation` is the field that names that of
    MLPs.
    """
    written = write_fields(config, fields)
    return written | {"num_key_value_heads": config.num_kv_heads, **activation}


def read_rotary(
    given: ConfigFields,
    *,
    theta: float = 10_000.0,
    scaling: Mapping[str, Any] = MappingProxyType({}),
    longest: int = 32_768,
    partial: float | None = None,
    without: Sequence[str] = (),
) -> Found:
    """The rotary embedding: `rope_theta`, and `rope_scaling` or `rope_parameters`.

    As in transformers, `rope_scaling` is taken whole where there are both, and a theta
    in it before that beside it.

    Args:
        theta, scaling, longest: the defaults of transformers.
        partial: that of `partial_rotary_factor`, which is an attribute; None where it
            has to be 1.
        without: fields of the section that change nothing here.
    """
    length = given("max_position_embeddings", longest)
    original = given("original_max_position_embeddings")
    changed, parameters = given("rope_scaling", {}), given("rope_parameters", {})
    # Whole: in transformers the two are not merged field by field.
    section = dict(changed or parameters or scaling)
    for name in without:
        section.pop(name, None)
    found = Found()
    if partial is not None:
        beside = given("partial_rotary_factor", partial)
        factor = section.pop("partial_rotary_factor", beside)
        found["partial_rotary_factor"] = float(factor)
    used = _scaling(section, length, original)
    base = given("rope_theta", theta)
    return found | {
        "rotary.theta": section.get("rope_theta", base),
        "rotary.scaling": used,
        "rotary.max_position_embeddings": length,
    }


def read_rotary_by_kind(
    given: ConfigFields, *, theta: float, longest: int, local_theta: str = ""
) -> Found:
    """As `read_rotary`, where `rope_parameters` has a section for layers with a window
    and one for those without; only the latter may have a scaling.

    Args:
        theta, longest: the defaults of transformers.
        local_theta: the attribute that is the theta of layers with a window; empty
            where it is that of the others.
    """
    length = given("max_position_embeddings", longest)
    given.ignore("original_max_position_embeddings")
    changed, sections = given("rope_scaling", {}), given("rope_parameters", {})
    whole = {**(sections.get(FULL) or {}), **changed}
    of_windows = sections.get(SLIDING) or {}
    scaling = _scaling(whole, length)
    is_alike = not _scaling(of_windows, length) and not sections.keys() - {
        FULL,
        SLIDING,
    }
    base = given("rope_theta", theta)
    found = {
        "rotary.theta": whole.get("rope_theta", base),
        "rotary.scaling": scaling,
        "rotary.max_position_embeddings": length,
    }
    other = of_windows.get("rope_theta", base)
    if local_theta:
        local_base = given("rope_local_base_freq", 10_000.0)
        found[local_theta] = of_windows.get("rope_theta", local_base)
    elif other != found["rotary.theta"]:
        is_alike = False
    if not is_alike:
        raise ValueError(
            f"rope_parameters is {shown(sections)}; only full_attention, and"
            " sliding_attention without a"
            f" scaling{'' if local_theta else ' and with the same theta'}, are"
            " supported."
        )
    return found


def write_rotary(rotary: RotaryConfig, *, has_default: bool = False) -> dict[str, Any]:
    """The inverse of `read_rotary`.

    `has_default` if transformers has a scaling by default: none has to be written too.
    """
    used = rotary.scaling or (DefaultRotary() if has_default else None)
    return {
        "rope_theta": rotary.theta,
        "max_position_embeddings": rotary.max_position_embeddings,
        "rope_scaling": rotary_to_hf(used),
    }


def write_rotary_by_kind(rotary: RotaryConfig, local_theta: float) -> dict[str, Any]:
    """The inverse of `read_rotary_by_kind`."""
    whole = rotary_to_hf(rotary.scaling or DefaultRotary()) or {}
    sections = {
        FULL: whole | {"rope_theta": rotary.theta},
        SLIDING: {"rope_type": "default", "rope_theta": local_theta},
    }
    return write_rotary(rotary) | {"rope_parameters": sections}


def read_windows(
    given: ConfigFields,
    num_layers: int,
    default: int | None,
    has_window: Callable[[int], bool] | None = None,
    is_on: bool = True,
) -> Found:
    """The layers with a window: `sliding_window`, whose default is this, and
    `layer_types`.

    Args:
        has_window: which layers have it by default; None if all have, and transformers
            ignores `layer_types`, so that others are refused.
        is_on: whether any has one by default.
    """
    layers = range(num_layers)
    windowed = [has_window is None or has_window(layer) for layer in layers]
    window = given("sliding_window", default, null=None)
    if window is None or not is_on:
        window, windowed = None, [False] * num_layers
    usual = [SLIDING if is_windowed else FULL for is_windowed in windowed]
    if has_window is None:
        given.only("layer_types", usual)
    # Absent in files of older versions, which had other fields for it
    kinds = given("layer_types", usual)
    if len(kinds) != num_layers:  # a shorter list would be repeated
        raise ValueError(
            f"layer_types has {len(kinds)} entries for {num_layers} layers."
        )
    window = window if SLIDING in kinds else None
    all_alike = {*kinds} == {FULL if window is None else SLIDING}
    return {
        "attention.window": window,
        "attention.layer_types": None if all_alike else kinds,
    }


def write_windows(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_windows` where layers may differ."""
    # Some models of transformers need a number
    window = config.attention.window or 4096
    return {"layer_types": layer_types(config), "sliding_window": window}


def layer_types(config: DecoderConfig) -> list[str]:
    """What each layer sees."""
    return [FULL if kind.window is None else SLIDING for kind in config.layer_kinds]


def read_hybrid_layers(
    given: ConfigFields,
    num_layers: int,
    usual: Sequence[str] | None = None,
    linear: str = LINEAR,
    full: str = FULL,
) -> Found:
    """The mixer of each layer of a hybrid decoder: `layer_types`.

    Args:
        usual: those where the field is absent; attention in every fourth if not given,
            or by `full_attention_interval`.
        linear, full: what the file calls the two.
    """
    if usual is None:
        every = given("full_attention_interval", 4)
        numbers = range(1, num_layers + 1)
        usual = [linear if number % every else full for number in numbers]
    kinds = given("layer_types", list(usual))
    if len(kinds) != num_layers:  # a shorter list would be repeated
        raise ValueError(
            f"layer_types has {len(kinds)} entries for {num_layers} layers."
        )
    known = {linear: LINEAR, full: FULL}
    if strange := [kind for kind in kinds if kind not in known]:
        raise ValueError(
            f"layer_types has {shown(strange[0])}; only {linear} and {full} are"
            " supported."
        )
    return {"layer_types": [known[kind] for kind in kinds]}


def write_hybrid_layers(
    config: HybridDecoderConfig, linear: str = LINEAR, full: str = FULL
) -> dict[str, Any]:
    """The inverse of `read_hybrid_layers`."""
    names = {LINEAR: linear, FULL: full}
    return {"layer_types": [names[kind] for kind in config.types_of_layers]}


def read_rotated(given: ConfigFields, layers: Sequence[int]) -> list[int]:
    """1 for each layer with a rotary embedding, and 0 for others, `no_rope_layers`
    despite its name; by default every so many have none.
    """
    interval = given("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % interval != 0) for layer in layers]
    rotates = given("no_rope_layers", []) or usual
    if len(rotates) < len(layers):
        raise ValueError(
            f"no_rope_layers has {len(rotates)} entries for {len(layers)} layers. Give"
            " one for each layer."
        )
    return rotates[: len(layers)]


def read_dense_prefix(given: ConfigFields, num_layers: int, usual: int) -> Found:
    """How many of the first layers have an MLP, `usual` where it is not said."""
    first = given("first_k_dense_replace", usual)
    return {"experts.dense_layers": [*range(min(first, num_layers))]}


def write_dense_prefix(config: SparseDecoderConfig) -> dict[str, Any]:
    """The inverse of `read_dense_prefix`."""
    return {"first_k_dense_replace": len(config.experts.dense_layers)}


def read_load_balance(given: ConfigFields) -> Found:
    """The weight of the load-balance loss; 0 where `output_router_logits` is false,
    which turns the loss off.
    """
    weight = given("router_aux_loss_coef", 0.001)
    is_on = given("output_router_logits", True)
    return {"experts.load_balance_weight": weight if is_on else 0.0}


def write_load_balance(config: SparseDecoderConfig) -> dict[str, Any]:
    """The inverse of `read_load_balance`."""
    return {"router_aux_loss_coef": config.experts.load_balance_weight_used}


def _scaling(
    section: Mapping[str, Any], longest: int, original: int | None = None
) -> RotaryScaling | None:
    """The scaling of `rope_parameters` or `rope_scaling`; `original` is a length beside
    them.
    """
    kind = section.get("rope_type", section.get("type", "default"))
    fields = {
        name: value
        for name, value in section.items()
        if name not in ("rope_theta", "finetuned")
    }
    # Phi-3 has it beside the section; these two kinds do not use it.
    if original is not None and kind not in ("default", "linear"):
        fields["original_max_position_embeddings"] = original
    try:
        scaling = rotary_from_hf(fields, max_position_embeddings=longest)
    except ValueError as error:
        raise ValueError(
            f"rope_scaling is {shown(fields)}: {printable(str(error))}"
        ) from error
    return None if isinstance(scaling, DefaultRotary) else scaling
