"""The fields of a `config.json` as they are read, so that none is overlooked."""

import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

from stacked_remat._messages import printable, shortened, shown

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
        self.document = document
        self._left = dict(document)
        self.latest: tuple[str, Any] = ("", None)

    def __call__(
        self, name: str, default: Any = None, kind: Any = None, null: Any = ...
    ) -> Any:
        """The field, which has the type `kind` or that of its default; the default, or
        `null`.

        A field in a section has the name `section.field`. Once one is read, all of them
        are known by such names.
        """
        section = name.rpartition(".")[0]
        if section in self._left:
            for own, value in self(section, {}).items():
                self._left[f"{section}.{own}"] = value
        # Removed, so that what no architecture reads is left over.
        is_absent = name not in self._left
        value = self._left.pop(name, None)
        if value is None:
            return default if is_absent or null is ... else null
        self.latest = name, value
        kind = kind or (object if default is None else type(default))
        # JSON's writers may leave out the point of a whole number.
        if not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{name} must be {kind.__name__}, got {shown(value)}.")
        return value

    def at_least(self, least: int, name: str, default: int) -> int:
        """A whole number from `least` on; raises ValueError for a smaller one."""
        value = self(name, default)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {shown(value)}.")
        return value

    def ignore(self, *names: str) -> None:
        """Fields of any value, which change nothing here."""
        for name in names:
            self(name)

    def only(self, name: str, *supported: Any) -> None:
        """Raises ValueError for a field that has another value than those supported,
        which mean the same.
        """
        # Null is absent: the default of transformers, which is supported
        value = self(name)
        if value not in (None, *supported):
            raise ValueError(
                f"{name} is {shown(value)}; only {shown(supported[0])} is supported."
            )

    def check_left(self, model_type: str, place: str) -> None:
        """Refuses fields that change the model and were not read, and warns of others
        that are unknown.
        """
        # What is off or empty changes nothing, whatever it means.
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
