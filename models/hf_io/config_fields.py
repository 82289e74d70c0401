"""Tables of the fields of a `config.json` in Hugging Face's format, by which it is read
and written.

An architecture's table is `DECODER_FIELDS` with its own entries. A field that no table
has gives a warning; those that are known to change what a model computes are refused.
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
"""Fields that change logits and that no decoder implements, unless its own table has
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
        read: the values that were read since this was emptied.
    """

    def __init__(self, document: Mapping[str, Any]):
        self._left, self.read = dict(document), {}

    def __call__(
        self, name: str, default: Any = None, kind: Any = None, null: Any = ...
    ) -> Any:
        """The field, which has the type `kind` or that of its default; the default, or
        `null`.
        """
        is_absent, value = name not in self._left, self._left.pop(name, None)
        if value is None:
            return default if is_absent or null is ... else null
        self.read[name], kind = (
            value,
            kind or (object if default is None else type(default)),
        )
        if not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{name} must be {kind.__name__}, got {shown(value)}.")
        return value

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
class Entry:
    """How the field of a name is read, from `ConfigFields` into `Found`, and what is
    written of a config.
    """

    read: Callable[[str, ConfigFields, Found], Any]
    write: Callable[[str, Any], dict[str, Any]]


FieldTable: TypeAlias = dict[str, Entry]


def attribute(
    path: str,
    default: Any = ...,
    aliases: Sequence[str] = (),
    written: str | None = None,
) -> Entry:
    """A field that is an attribute of the config, at this path.

    Args:
        default: where the field is absent or null, as in transformers; `...` if it may
            not be.
        aliases: other names that are read.
        written: the path of what is written, where it is another.
    """

    def read(name: str, given: ConfigFields, found: Found) -> None:
        kind = int if default is ... else object  # of sizes, which other entries need
        values = [
            value
            for one in (name, *aliases)
            if (value := given(one, kind=kind)) is not None
        ]
        if not values and default is ...:
            raise ValueError(f"{name} is missing.")
        found[path] = values[0] if values else default

    parts = (written or path).split(".")
    return Entry(
        read, lambda name, config: {name: functools.reduce(getattr, parts, config)}
    )


def only(*values: Any, written: bool = False) -> Entry:
    """A field of which the values supported mean the same, as do null and absence; the
    first is written.
    """
    return Entry(
        lambda name, given, _: given.only(name, *values),
        lambda name, _: {name: values[0]} if written else {},
    )


def ignored(written: Any = ...) -> Entry:
    """A field of any value, which changes nothing here; `...` writes none."""
    return Entry(
        lambda name, given, _: given(name, None),
        lambda name, _: {} if written is ... else {name: written},
    )


def computed(
    read: Callable[[ConfigFields, Found], None],
    write: Callable[[Any], dict[str, Any]] = lambda _: {},
) -> Entry:
    """Fields from which attributes of the config are computed, and the other way
    round.
    """
    return Entry(
        lambda _, given, found: read(given, found), lambda _, config: write(config)
    )


def kv_heads(usual: int | None = None) -> Entry:
    """`num_key_value_heads`, which is `usual` where it is absent, if that is given, and
    else all heads.
    """

    def read(given: ConfigFields, found: Found) -> None:
        every = found["num_heads"]
        found["num_kv_heads"] = given("num_key_value_heads", usual or every, null=every)

    return computed(read, lambda config: {"num_key_value_heads": config.num_kv_heads})


def rope(
    *,
    theta: float = 10_000.0,
    scaling: Mapping[str, Any] = MappingProxyType({}),
    longest: int = 32_768,
    by_kind: bool = False,
    local: str | None = None,
) -> Entry:
    """The rotary embedding: `rope_theta`, and `rope_scaling` or `rope_parameters`.

    As in transformers, `rope_scaling` is taken whole where there are both, but for
    `by_kind`, and a theta in it before that beside it.

    Args:
        theta, scaling, longest: the defaults of transformers.
        by_kind: whether `rope_parameters` are of layers with and without a window.
        local: the path of the theta of layers with a window, where these have one of
            their own.
    """

    def read(given: ConfigFields, found: Found) -> None:
        length, own = (
            given("max_position_embeddings", longest),
            given("original_max_position_embeddings"),
        )
        changed, parameters = given("rope_scaling", {}), given("rope_parameters", {})
        sections = parameters if by_kind else {FULL: changed or parameters or scaling}
        whole, of_windows = (sections.get(kind) or {} for kind in (FULL, SLIDING))
        if by_kind:
            whole, own = {**whole, **changed}, None
        base = given("rope_theta", theta)
        found["rotary.theta"], found["rotary.max_position_embeddings"] = (
            whole.get("rope_theta", base),
            length,
        )
        found["rotary.scaling"] = _scaling(whole, length, own)
        if by_kind:
            base = base if local is None else given("rope_local_base_freq", 10_000.0)
            other = of_windows.get("rope_theta", base)
            kept = found.setdefault(local or "rotary.theta", other)
            if (
                sections.keys() - {FULL, SLIDING}
                or kept != other
                or _scaling(of_windows, length)
            ):
                raise ValueError(
                    f"rope_parameters is {shown(parameters)}; only full_attention, and"
                    " sliding_attention without a"
                    f" scaling{'' if local else ' and with the same theta'}, are"
                    " supported."
                )

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
            written["rope_local_base_freq"] = of_windows["rope_theta"] = getattr(
                config, local
            )
        if by_kind:
            whole = (rotary_to_hf(rotary.scaling or DefaultRotary()) or {}) | base
            written["rope_parameters"] = {
                "full_attention": whole,
                "sliding_attention": of_windows,
            }
        return written

    return computed(read, write)


Windowed: TypeAlias = Callable[[ConfigFields], Callable[[int], bool]]
"""Which layers have the window by default: by the fields, whether the layer of a number
has it.
"""


def full_every(period: int) -> Windowed:
    """Windows in all layers but every `period`-th."""
    return lambda _: lambda layer: (layer + 1) % period != 0


def layer_types(config: DecoderConfig) -> list[str]:
    """What each layer sees."""
    return [FULL if spec.window is None else SLIDING for spec in config.specs]


def windows(
    default: int | None, usual: Windowed | None = None, switch: str | None = None
) -> Entry:
    """The layers with a window: `sliding_window`, whose default is this, and
    `layer_types`.

    Args:
        usual: which layers have it by default; None if all have, and transformers
            ignores `layer_types`, so that others are refused.
        switch: the field that turns the window on, if there is one.
    """

    def read(given: ConfigFields, found: Found) -> None:
        window, layers = (
            given("sliding_window", default, null=None),
            range(found["num_layers"]),
        )
        if switch is not None and not given(switch, False):
            window = None
        has_window = (lambda _: True) if usual is None else usual(given)
        windowed = [
            SLIDING if window is not None and has_window(one) else FULL
            for one in layers
        ]
        if usual is None:
            given.only("layer_types", windowed)
        kinds = given("layer_types", windowed)
        if len(kinds) != len(windowed):  # a shorter list would be repeated
            raise ValueError(
                f"layer_types has {len(kinds)} entries for {len(windowed)} layers."
            )
        window = window if SLIDING in kinds else None
        all_alike = {*kinds} == {FULL if window is None else SLIDING}
        found["attention.window"], found["attention.layer_types"] = (
            window,
            None if all_alike else kinds,
        )

    def write(config: DecoderConfig) -> dict[str, Any]:
        window = config.attention.window
        written = {} if usual is None else {"layer_types": layer_types(config)}
        if switch is not None:
            return written | {"sliding_window": window, switch: window is not None}
        # Some need a number
        return written | {"sliding_window": window or (4096 if written else None)}

    return computed(read, write)


def _read_load_balance(given: ConfigFields, found: Found) -> None:
    weight, is_on = (
        given("router_aux_loss_coef", 0.001),
        given("output_router_logits", True),
    )
    found["experts.load_balance_weight"] = weight if is_on else 0.0


LOAD_BALANCE = computed(
    _read_load_balance,
    lambda config: {"router_aux_loss_coef": config.experts.load_balance_weight_used},
)
"""The weight of the load-balance loss; 0 where `output_router_logits` is false, which
turns the loss off.
"""

DECODER_FIELDS: FieldTable = {
    "hidden_size": attribute("hidden_dim"),
    "intermediate_size": attribute("mlp_dim", written="Mlp.size"),
    "num_hidden_layers": attribute("num_layers"),
    "num_attention_heads": attribute("num_heads"),
    "num_key_value_heads": kv_heads(),
    "head_dim": attribute("attention.head_dim", None, written="head_dim"),
    "hidden_act": only("silu", "swish", written=True),
    "attention_bias": attribute("attention.bias", False),
    "attention_dropout": only(0),
    "rotary": rope(),
    "rms_norm_eps": attribute("rms_norm_eps", 1e-6),
    "initializer_range": attribute("initializer_range", 0.02),
    "tie_word_embeddings": attribute("tie_word_embeddings", False),
}
"""The fields that most architectures have."""


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
    if original is not None and kind not in ("default", "linear"):
        fields["original_max_position_embeddings"] = original
    try:
        scaling = rotary_from_hf(fields, max_position_embeddings=longest)
    except ValueError as error:
        raise ValueError(
            f"rope_scaling is {shown(fields)}: {printable(str(error))}"
        ) from error
    return None if isinstance(scaling, DefaultRotary) else scaling
