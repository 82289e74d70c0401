"""Tables of the fields of a `config.json` in Hugging Face's format, by which it is read and written.

An architecture's table is `DECODER_FIELDS` with its own entries. A field that no table has gives a warning;
those that are known to change what a model computes are refused.
"""

import functools
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from models.decoder.config import FULL, SLIDING, DecoderConfig, RotaryConfig
from models.hf_io.quantized import FP8_BLOCK
from stacked_remat._messages import printable, shortened, shown
from stacked_remat.ops import DefaultRotary, rotary_from_hf, rotary_to_hf

_WITHOUT_EFFECT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation _name_or_path
    _sliding_window_pattern architectures auto_map bos_token_id cache_implementation do_sample dtype
    eos_token_id ep_size finetuning_task id2label initializer_range is_decoder is_encoder_decoder
    label2id max_length name_or_path output_attentions output_hidden_states output_router_logits pad_token_id
    pretraining_tp problem_type return_dict task_specific_params temperature tokenizer_class
    top_k top_p torch_dtype torchscript transformers_version unsloth_version use_bfloat16 use_cache
    """.split()
)
"""Fields that do not change logits; some are read all the same, such as `eos_token_id` for generation.

`pad_token_id` does change a gradient: transformers gives its embedding none. Here weights and documents mark
padding, and a token that occurs in the text is trained.
"""

_MUST_BE_OFF = frozenset(
    """
    add_cross_attention alibi attention_chunk_size attn_logit_softcapping chunk_size_feed_forward clip_qkv
    cross_attention_hidden_size final_logit_softcapping kv_lora_rank logit_softcap mlp_bias n_shared_experts
    no_rope_layers num_kv_shared_layers parallel_attn pruned_heads q_lora_rank qkv_bias router_jitter_noise
    shared_expert_intermediate_size tie_encoder_decoder use_bidirectional_attention use_qk_norm
    """.split()
)
_MUST_BE_ONE = frozenset(
    """
    attention_multiplier embedding_multiplier logit_scale logits_scaling partial_rotary_factor
    residual_multiplier rotary_pct
    """.split()
)
"""Fields that change logits and that no decoder implements, unless its own table has them."""

_KEPT = {"modules_to_not_convert", "dequantize"}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
_LARGEST = {int: 2**31 - 1, float: float(np.finfo(np.float32).max)}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "a mapping"}

Found: TypeAlias = dict[str, Any]
"""Values that were read, by the path of the attribute of the config: `attention.window`."""


class ConfigFields:
    """The fields of a `config.json`; reading one removes it, so that the unknown ones are left over.

    A field that is absent or null has its default, and without one (`...`) is missing. All methods raise
    `ValueError` for a field that is missing or has another type or value than expected.
    """

    def __init__(self, document: Mapping[str, Any], config_class: type[DecoderConfig] = DecoderConfig):
        self._left, self.config_class = dict(document), config_class

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __call__(self, name: str, default: Any = ..., kind: type = object) -> Any:
        """The field, of a type; numbers are not negative, and whole ones can be floats too."""
        value = self._left.pop(name, None)
        if value is None and default is ...:
            raise ValueError(f"{name} is missing.")
        return default if value is None else _checked(name, value, kind)

    def check_quantization(self, quant_methods: Sequence[str]) -> None:
        """Refuses weights that are quantized in other ways than these; the tensors say which of them are."""
        given = self("quantization_config", {}, dict)
        usual = {"quant_method": given.get("quant_method")}
        usual |= _FP8 if given.get("quant_method") == "fp8" else {}
        odd = [name for name, value in given.items() if name not in _KEPT and usual.get(name) != value]
        if given and (odd or given.get("quant_method") not in quant_methods):
            only = f"quant_method {' or '.join(map(repr, quant_methods))}" if quant_methods else "None"
            raise ValueError(f"quantization_config is {shown(given)}; only {only} is supported.")

    def only(self, name: str, supported: Any) -> None:
        """Refuses a field that has another value than the only one that is supported."""
        value = self(name, supported)
        # False == 0, but one is a switch and the other a number.
        if value != supported or isinstance(value, bool) != isinstance(supported, bool):
            raise ValueError(f"{name} is {shown(value)}; only {supported!r} is supported.")

    def check_left(self, model_type: str) -> None:
        """Refuses fields that change the model and were not read, and warns of others that are unknown."""
        left = {name: value for name, value in self._left.items() if value not in (None, False, [], {})}
        for name in sorted(left.keys() & _MUST_BE_ONE):
            self.only(name, 1)
        for name in sorted(left.keys() & _MUST_BE_OFF):
            raise ValueError(f"{name} is {shown(left[name])}; this is not supported.")
        known = _WITHOUT_EFFECT | _MUST_BE_ONE | _MUST_BE_OFF
        if unknown := [printable(name) for name in sorted(left.keys() - known)]:
            warnings.warn(
                f"{shortened(unknown)}: unknown fields of a {model_type} decoder, which are not used. Check "
                f"that they do not change what the model computes.",
                stacklevel=3,
            )


@dataclass(frozen=True)
class SameAs:
    """The value of another attribute of the config, by its path."""

    path: str


@dataclass(frozen=True)
class Entry:
    """How the field of a name is read, from `ConfigFields` into `Found`, and what is written of a config."""

    read: Callable[[str, ConfigFields, Found], Any]
    write: Callable[[str, Any], dict[str, Any]]


FieldTable: TypeAlias = dict[str, Entry]


def attribute(
    path: str, default: Any = ..., aliases: Sequence[str] = (), written: str | None = None
) -> Entry:
    """A field that is an attribute of the config, at this path.

    Args:
        path: of the attribute.
        default: where the field is absent or null, as in transformers; `...` if it may not be.
        aliases: other names that are read.
        written: the path of what is written, where it is another.
    """

    def read(name: str, given: ConfigFields, found: Found) -> None:
        kind = _kind(given.config_class, path)
        value = given(name, None, kind)
        for alias in aliases:
            value = agreed(name, value, alias, given(alias, None, kind))
        if value is None and default is ...:
            raise ValueError(f"{name} is missing.")
        usual = found[default.path] if isinstance(default, SameAs) else default
        found[path] = usual if value is None else value

    parts = (written or path).split(".")
    return Entry(read, lambda name, config: {name: functools.reduce(getattr, parts, config)})


def only(value: Any, *, written: bool = False) -> Entry:
    """A field of which a single value is supported, and may be written; null and absence count as it."""
    return Entry(
        lambda name, given, _: given.only(name, value), lambda name, _: {name: value} if written else {}
    )


def ignored(written: Any = ...) -> Entry:
    """A field of any value, which changes nothing here; `...` writes none."""
    return Entry(
        lambda name, given, _: given(name, None),
        lambda name, _: {} if written is ... else {name: written},
    )


def computed(
    read: Callable[[ConfigFields, Found], None], write: Callable[[Any], dict[str, Any]] = lambda _: {}
) -> Entry:
    """Fields from which attributes of the config are computed, and the other way round."""
    return Entry(lambda _, given, found: read(given, found), lambda _, config: write(config))


def rope(
    *,
    theta: float = 10_000.0,
    scaling: Mapping[str, Any] = MappingProxyType({}),
    longest: int = 32_768,
    by_kind: bool = False,
    local: str | None = None,
) -> Entry:
    """The rotary embedding: `rope_theta`, and `rope_scaling` or `rope_parameters`.

    Args:
        theta, scaling, longest: the defaults of transformers.
        by_kind: whether `rope_parameters` are written for layers with and without a window.
        local: the path of the theta of layers with a window, where these have one of their own.
    """
    usual = {"rope_theta": theta, "rope_scaling": scaling}

    def read(given: ConfigFields, found: Found) -> None:
        length = given("max_position_embeddings", longest, int)
        parameters = given("rope_parameters", None)
        is_by_kind = isinstance(parameters, Mapping) and "full_attention" in parameters
        of_kinds = parameters if is_by_kind else {"full_attention": parameters}
        sections = (of_kinds["full_attention"], given("rope_scaling", None))
        found["rotary"] = _rotary(sections, given("rope_theta", None), usual, length)
        if not is_by_kind and local is None:
            return
        section = of_kinds.get("sliding_attention")
        own = {"rope_theta": 10_000.0 if local else found["rotary"].theta, "rope_scaling": {}}
        theta_of_windows = given("rope_local_base_freq", None)
        of_windows = _rotary((section,), theta_of_windows, own, length)
        if of_windows.scaling is not None or (local is None and of_windows.theta != found["rotary"].theta):
            raise ValueError(f"rope_parameters of sliding_attention are {shown(section)}; not supported.")
        if local is not None:
            found[local] = of_windows.theta

    def write(config: DecoderConfig) -> dict[str, Any]:
        rotary = config.rotary
        # Where transformers has a scaling by default, none has to be written too.
        used = rotary.scaling or (DefaultRotary() if scaling else None)
        written = {
            "max_position_embeddings": rotary.max_position_embeddings,
            "rope_theta": rotary.theta,
            "rope_scaling": rotary_to_hf(used),
        }
        if local is not None:
            written["rope_local_base_freq"] = getattr(config, local)
        if by_kind:
            whole = {**(rotary_to_hf(rotary.scaling or DefaultRotary()) or {}), "rope_theta": rotary.theta}
            base = rotary.theta if local is None else getattr(config, local)
            of_windows = {"rope_type": "default", "rope_theta": base}
            written["rope_parameters"] = {"full_attention": whole, "sliding_attention": of_windows}
        return written

    return computed(read, write)


Usual: TypeAlias = Callable[[ConfigFields, int | None, int], tuple[int | None, Sequence[bool]]]
"""(fields, `sliding_window`, number of layers) to the window and which layers have it by default."""


def full_every(period: int) -> Usual:
    """Windows in all layers but every `period`-th."""

    def usual(given: ConfigFields, window: int | None, num_layers: int) -> tuple[int | None, list[bool]]:
        layers = range(1, num_layers + 1)
        return window, [window is not None and layer % period != 0 for layer in layers]

    return usual


def layer_types(config: DecoderConfig) -> dict[str, Any]:
    """The fields of windows: a number even if no layer has a window, since some classes need one."""
    kinds = [FULL if spec.window is None else SLIDING for spec in config.specs]
    return {"sliding_window": config.attention.window or 4096, "layer_types": kinds}


def window_of_all(default: int | None) -> Entry:
    """`sliding_window`, whose default is this, of an architecture with a window in all layers or in none.

    Transformers ignores `layer_types` there, so they are refused.
    """

    def read(given: ConfigFields, found: Found) -> None:
        given.only("layer_types", None)
        window = given("sliding_window", None if "sliding_window" in given else default, int)
        found["attention.window"] = window

    return computed(read, lambda config: {"sliding_window": config.attention.window})


def windows(
    default: int | None, usual: Usual, write: Callable[[DecoderConfig], dict[str, Any]] = layer_types
) -> Entry:
    """The layers with a window: `sliding_window`, whose default is this, and `layer_types`."""

    def read(given: ConfigFields, found: Found) -> None:
        window = given("sliding_window", None if "sliding_window" in given else default, int)
        window, without = usual(given, window, found["num_layers"])
        names = [SLIDING if one else FULL for one in without]
        kinds = given("layer_types", names, list)
        if strange := [kind for kind in kinds if kind not in (SLIDING, FULL)]:
            raise ValueError(
                f"layer_types has {shown(strange[0])}; full_attention and sliding_attention are supported."
            )
        if len(kinds) != len(names):
            raise ValueError(
                f"layer_types has {len(kinds)} entries for {len(names)} layers; give one for each."
            )
        if SLIDING in kinds and window is None:
            raise ValueError("layer_types has sliding_attention, but there is no sliding_window.")
        found["attention.window"] = window if SLIDING in kinds else None
        found["attention.layer_types"] = tuple(kinds) if SLIDING in kinds else None

    return computed(read, write)


def _read_load_balance(given: ConfigFields, found: Found) -> None:
    """`router_aux_loss_coef`; 0 where `output_router_logits` is false, which turns the loss off."""
    weight = given("router_aux_loss_coef", 0.001, float)
    is_on = given("output_router_logits", True, bool)
    found["experts.load_balance_weight"] = weight if is_on else 0.0


LOAD_BALANCE = computed(
    _read_load_balance, lambda config: {"router_aux_loss_coef": config.experts.load_balance_weight_used}
)
"""The weight of the load-balance loss."""

DECODER_FIELDS: FieldTable = {
    "hidden_size": attribute("hidden_dim"),
    "intermediate_size": attribute("mlp_dim", written="Mlp.size"),
    "num_hidden_layers": attribute("num_layers"),
    "num_attention_heads": attribute("num_heads"),
    "num_key_value_heads": attribute("num_kv_heads", SameAs("num_heads")),
    "head_dim": attribute("attention.head_dim", None, written="HeadDim.size"),
    "hidden_act": only("silu", written=True),
    "attention_bias": attribute("attention.bias", False),
    "attention_dropout": only(0),
    "rotary": rope(),
    "rms_norm_eps": attribute("rms_norm_eps", 1e-6),
    "initializer_range": attribute("initializer_range", 0.02),
    "tie_word_embeddings": attribute("tie_word_embeddings", False),
}
"""The fields that most architectures have."""


def _kind(config_class: type, path: str) -> type:
    """The type of an attribute, None left out."""
    hint: Any = functools.reduce(
        lambda one, part: typing.get_type_hints(one)[part], path.split("."), config_class
    )
    return next((one for one in typing.get_args(hint) if one is not type(None)), hint)


def _rotary(sections: Sequence[Any], theta: Any, usual: Mapping[str, Any], longest: int) -> RotaryConfig:
    """The rotary embedding of one kind of layers from `rope_parameters` and `rope_scaling`."""
    given = [section for section in sections if section is not None]
    used = {} if given else dict(usual["rope_scaling"])
    for section in given:
        if not isinstance(section, Mapping):
            raise ValueError(f"rope_scaling is {shown(section)}; a mapping with rope_type is expected.")
        older = {"rope_type": section["type"]} if "type" in section else {}
        used |= older | {name: value for name, value in section.items() if name != "type"}
    theta = agreed("rope_theta", theta, "rope_parameters.rope_theta", used.pop("rope_theta", None))
    theta = _checked("rope_theta", usual["rope_theta"] if theta is None else theta, float)
    try:
        scaling = rotary_from_hf(used, max_position_embeddings=longest)
    except (TypeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"rope_scaling is {shown(used)}: {printable(str(error))}") from error
    return RotaryConfig(theta, None if isinstance(scaling, DefaultRotary) else scaling, longest)


def agreed(name: str, value: Any, alias: str, other: Any) -> Any:
    """The value of a field that has two names; None where neither is given.

    Raises:
        ValueError: both are given and differ.
    """
    if value is not None and other is not None and value != other:
        raise ValueError(
            f"{name} is {shown(value)} and {alias} is {shown(other)}, and these are two names of one field. "
            f"Correct the one that is wrong, or leave it out."
        )
    return other if value is None else value


def _checked(name: str, value: Any, kind: type) -> Any:
    """The value, if it is of the type and not too large."""
    types = (int, float) if kind is float else (kind,)
    fits = kind is object or type(value) in types
    if not fits or (kind in _LARGEST and not 0 <= value <= _LARGEST[kind]):
        raise ValueError(f"{name} is {shown(value)}; {_KINDS[kind]} is expected.")
    return float(value) if kind is float else value
