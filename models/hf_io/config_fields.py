"""Tables of the fields of a `config.json` in Hugging Face's format, by which it is read and written.

An architecture's table is `DECODER_FIELDS` with its own entries. A field that no table has gives a warning;
those that are known to change what a model computes are refused.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from models.decoder.config import FULL, SLIDING, DecoderConfig
from stacked_remat._messages import printable, shortened, shown
from stacked_remat.ops import DefaultRotary, RotaryScaling, rotary_from_hf, rotary_to_hf

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

Found: TypeAlias = dict[str, Any]
"""Values that were read, by the path of the attribute of the config: `attention.window`."""


class ConfigFields:
    """The fields of a `config.json`; reading one removes it, so that the unknown ones are left over.

    A field that is absent or null has its default.

    Attributes:
        read: the values that were read since this was emptied.
    """

    def __init__(self, document: Mapping[str, Any]):
        self._left, self.read = dict(document), {}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __call__(self, name: str, default: Any = None, kind: Any = None) -> Any:
        """The field, which has the type `kind` or that of its default, or the default."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        self.read[name], kind = value, kind or (object if default is None else type(default))
        if not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{name} must be {kind.__name__}, got {shown(value)}.")
        return value

    def only(self, name: str, supported: Any) -> None:
        """Raises ValueError for a field that has another value than the only one that is supported."""
        value = self(name)
        if value not in (None, supported):
            raise ValueError(f"{name} is {shown(value)}; only {supported!r} is supported.")

    def check_left(self, model_type: str, place: str) -> None:
        """Refuses fields that change the model and were not read, and warns of others that are unknown."""
        left = {name: value for name, value in self._left.items() if value not in (None, False, [], {})}
        for name in sorted(left.keys() & _MUST_BE_ONE):
            self.only(name, 1)
        for name in sorted(left.keys() & _MUST_BE_OFF):
            raise ValueError(f"{name} is {shown(left[name])}; this is not supported.")
        known = _WITHOUT_EFFECT | _MUST_BE_ONE | _MUST_BE_OFF
        if unknown := [printable(name) for name in sorted(left.keys() - known)]:
            warnings.warn(
                f"{place} has {shortened(unknown)}: unknown fields of a {model_type} decoder, which are not "
                f"used. Check that they do not change what the model computes.",
                stacklevel=3,
            )


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
        default: where the field is absent or null, as in transformers, or the path of the attribute whose
            value it has then; `...` if it may not be.
        aliases: other names that are read.
        written: the path of what is written, where it is another.
    """

    def read(name: str, given: ConfigFields, found: Found) -> None:
        kind = int if default is ... else object  # of sizes, which other entries need
        values = [value for one in (name, *aliases) if (value := given(one, kind=kind)) is not None]
        if not values and default is ...:
            raise ValueError(f"{name} is missing.")
        usual = found[default] if isinstance(default, str) else default
        found[path] = values[0] if values else usual

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

    def read(given: ConfigFields, found: Found) -> None:
        length = given("max_position_embeddings", longest)
        parameters = given("rope_parameters", {})
        of_kinds = parameters if "full_attention" in parameters else {"full_attention": parameters}
        whole, of_windows = of_kinds["full_attention"], of_kinds.get("sliding_attention", {})
        base = whole.get("rope_theta", given("rope_theta", theta))
        found["rotary.theta"], found["rotary.max_position_embeddings"] = base, length
        found["rotary.scaling"] = _scaling(given("rope_scaling", {}) or whole or scaling, length)
        if local is not None:
            found[local] = of_windows.get("rope_theta", given("rope_local_base_freq", 10_000.0))
        is_another = local is None and of_windows.get("rope_theta", base) != base
        if is_another or _scaling(of_windows, length) is not None:
            raise ValueError(f"rope_parameters of sliding_attention are {shown(of_windows)}; not supported.")

    def write(config: DecoderConfig) -> dict[str, Any]:
        rotary = config.rotary
        # Where transformers has a scaling by default, none has to be written too.
        used = rotary.scaling or (DefaultRotary() if scaling else None)
        base = {"rope_theta": rotary.theta}
        written = base | {
            "max_position_embeddings": rotary.max_position_embeddings,
            "rope_scaling": rotary_to_hf(used),
        }
        of_windows = {"rope_type": "default", **base}
        if local is not None:
            written["rope_local_base_freq"] = of_windows["rope_theta"] = getattr(config, local)
        if by_kind:
            whole = (rotary_to_hf(rotary.scaling or DefaultRotary()) or {}) | base
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
        found["attention.window"] = given("sliding_window", None if "sliding_window" in given else default)

    return computed(read, lambda config: {"sliding_window": config.attention.window})


def windows(
    default: int | None, usual: Usual, write: Callable[[DecoderConfig], dict[str, Any]] = layer_types
) -> Entry:
    """The layers with a window: `sliding_window`, whose default is this, and `layer_types`."""

    def read(given: ConfigFields, found: Found) -> None:
        window = given("sliding_window", None if "sliding_window" in given else default)
        window, windowed = usual(given, window, found["num_layers"])
        kinds = given("layer_types", [SLIDING if one else FULL for one in windowed])
        if len(kinds) != len(windowed):  # a shorter list would be repeated
            raise ValueError(f"layer_types has {len(kinds)} entries for {len(windowed)} layers.")
        found["attention.window"] = window if SLIDING in kinds else None
        found["attention.layer_types"] = None if {*kinds} == {FULL} else kinds

    return computed(read, write)


def _read_load_balance(given: ConfigFields, found: Found) -> None:
    weight, is_on = given("router_aux_loss_coef", 0.001), given("output_router_logits", True)
    found["experts.load_balance_weight"] = weight if is_on else 0.0


LOAD_BALANCE = computed(
    _read_load_balance, lambda config: {"router_aux_loss_coef": config.experts.load_balance_weight_used}
)
"""The weight of the load-balance loss; 0 where `output_router_logits` is false, which turns the loss off."""

DECODER_FIELDS: FieldTable = {
    "hidden_size": attribute("hidden_dim"),
    "intermediate_size": attribute("mlp_dim", written="Mlp.size"),
    "num_hidden_layers": attribute("num_layers"),
    "num_attention_heads": attribute("num_heads"),
    "num_key_value_heads": attribute("num_kv_heads", "num_heads"),
    "head_dim": attribute("attention.head_dim", None, written="head_dim"),
    "hidden_act": only("silu", written=True),
    "attention_bias": attribute("attention.bias", False),
    "attention_dropout": only(0),
    "rotary": rope(),
    "rms_norm_eps": attribute("rms_norm_eps", 1e-6),
    "initializer_range": attribute("initializer_range", 0.02),
    "tie_word_embeddings": attribute("tie_word_embeddings", False),
}
"""The fields that most architectures have."""


def _scaling(section: Mapping[str, Any], longest: int) -> RotaryScaling | None:
    """The scaling of `rope_parameters` or `rope_scaling`."""
    fields = {name: value for name, value in section.items() if name != "rope_theta"}
    try:
        scaling = rotary_from_hf(fields, max_position_embeddings=longest)
    except ValueError as error:
        raise ValueError(f"rope_scaling is {shown(fields)}: {printable(str(error))}") from error
    return None if isinstance(scaling, DefaultRotary) else scaling
