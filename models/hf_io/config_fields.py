"""Reads the fields of a `config.json` in Hugging Face's format, and those that all decoders share.

Every field that changes what a model computes is used, or refused by name. Fields that are known not to
change it are skipped, and any other field is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np

from models.transformer.config import DecoderConfig, RotaryConfig
from stacked_remat._messages import printable, shortened, shown
from stacked_remat.ops import DefaultRotary, RotaryScaling, rotary_from_hf, rotary_to_hf

_WITHOUT_EFFECT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation _name_or_path
    architectures bos_token_id do_sample dtype eos_token_id finetuning_task id2label initializer_range
    is_decoder is_encoder_decoder label2id max_length name_or_path output_attentions output_hidden_states
    output_router_logits pad_token_id problem_type return_dict task_specific_params temperature
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version unsloth_version use_bfloat16
    use_cache
    """.split()
)
"""Fields that do not change logits; some are read all the same, such as `eos_token_id` for generation.

`pad_token_id` does change a gradient: transformers gives its embedding none. Here weights and documents mark
padding, and a token that occurs in the text is trained.
"""

_BUILT_IN: Mapping[str, Any] = {
    "attention_dropout": 0,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "add_cross_attention": False,
    "hidden_act": "silu",
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
"""Fields that change logits, with the value that every decoder has built in; null counts as absent."""

_USUAL: Mapping[str, Any] = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {},
    "rope_theta": 10_000.0,
}
"""The values of fields that are absent, where the architecture has no other."""

_QUANTIZATION = {"quant_method", "modules_to_not_convert", "dequantize"}
_MOST_LAYERS = 10_000
_LARGEST = float(np.finfo(np.float32).max)
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_ANY_HEAD = 64
_ROTARY_NUMBERS = {field.name for kind in RotaryScaling.__subclasses__() for field in fields(kind)}
_ROTARY_NUMBERS -= {"truncate"}


class ConfigFields:
    """The fields of a `config.json`; reading one removes it, so that the unknown ones are left over.

    A field that is absent or null has its default, and without one (`...`) is missing. All methods raise
    `ValueError` for a field that is missing or has another type or value than expected.
    """

    def __init__(self, document: Mapping[str, Any]):
        self._left = dict(document)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __call__(self, name: str, default: Any = ...) -> Any:
        """The field, of any type."""
        value = self._left.pop(name, None)
        if value is None and default is ...:
            raise ValueError(f"{name} is missing.")
        return default if value is None else value

    def size(self, name: str, default: Any = ..., at_least: int = 1, at_most: int = 2**31 - 1) -> Any:
        """A whole number."""
        value = self(name, default)
        if value is not None and (type(value) is not int or value < at_least):
            raise ValueError(f"{name} is {shown(value)}; a whole number of at least {at_least} is expected.")
        if value is not None and value > at_most:
            raise ValueError(f"{name} is {shown(value)}; a whole number of at most {at_most} is expected.")
        return value

    def number(self, name: str, default: float) -> float:
        """A number that is not negative."""
        return _number(name, self(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        """`true` or `false`."""
        value = self(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shown(value)}; true or false is expected.")
        return value

    def sequence(self, name: str, kind: type, default: Any) -> Any:
        """A list whose entries are all of one type."""
        value = self(name, default)
        if value is not None and not (
            isinstance(value, list | tuple) and all(type(entry) is kind for entry in value)
        ):
            raise ValueError(f"{name} is {shown(value)}; a list of {kind.__name__} is expected.")
        return value

    def load_balance_weight(self) -> float:
        """`router_aux_loss_coef`; 0 where `output_router_logits` is false, which turns the loss off."""
        weight = self.number("router_aux_loss_coef", 0.001)
        return weight if self.boolean("output_router_logits", True) else 0.0

    def check_quantization(self, quant_methods: Sequence[str]) -> None:
        """Refuses weights that are quantized in other ways than these; the tensors say which of them are."""
        given = self("quantization_config", None)
        readable = isinstance(given, Mapping) and given.get("quant_method") in quant_methods
        if given is None or (readable and given.keys() <= _QUANTIZATION):
            return
        only = f"quant_method {' or '.join(map(repr, quant_methods))}" if quant_methods else "None"
        raise ValueError(f"quantization_config is {shown(given)}; only {only} is supported.")

    def decoder(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """The arguments of `DecoderConfig` that every architecture's `config.json` names alike.

        `defaults` has other values than usual for fields that are absent: `rms_norm_eps`, `rope_theta`,
        `rope_scaling`, `max_position_embeddings`.
        """
        usual = {**_USUAL, **defaults}
        self.check_built_in(_BUILT_IN)
        dtype = agreed("dtype", self("dtype", None), "torch_dtype", self("torch_dtype", None))
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"dtype is {shown(dtype)}; one of {', '.join(_DTYPES)} is expected.")
        return {
            "hidden_dim": self.size("hidden_size"),
            "num_layers": self.size("num_hidden_layers", at_most=_MOST_LAYERS),
            "num_heads": self.size("num_attention_heads"),
            "mlp_dim": self.size("intermediate_size"),
            "rotary": self._rotary(usual),
            "rms_norm_eps": self.number("rms_norm_eps", usual["rms_norm_eps"]),
            "initializer_range": self.number("initializer_range", 0.02),
            "tie_word_embeddings": self.boolean("tie_word_embeddings", False),
        }

    def check_built_in(self, values: Mapping[str, Any]) -> None:
        """Refuses fields with another value than the only one that is supported."""
        for name, only in values.items():
            value = self(name, only)
            # False == 0, but one is a switch and the other a number.
            if value != only or isinstance(value, bool) != isinstance(only, bool):
                raise ValueError(f"{name} is {shown(value)}; only {only!r} is supported.")

    def check_unknown(self, model_type: str) -> None:
        """Refuses fields that were not read, unless they are known to have no effect."""
        left = sorted(name for name, value in self._left.items() if value is not None)
        if unknown := [printable(name) for name in left if name not in _WITHOUT_EFFECT]:
            raise ValueError(
                f"{shortened(unknown)}: unknown fields of a {model_type} decoder. Remove them if they do not "
                f"change what the model computes."
            )

    def windowed_layers(self, usual: Sequence[str]) -> tuple[int, ...]:
        """The numbers of the layers with a window by `layer_types`, which is `usual` where it is absent."""
        kinds = self.sequence("layer_types", str, usual)
        strange = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if strange:
            raise ValueError(
                f"layer_types has {shown(strange)}; full_attention and sliding_attention are supported."
            )
        if len(kinds) != len(usual):
            raise ValueError(
                f"layer_types has {len(kinds)} entries for {len(usual)} layers; give one for each."
            )
        return tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")

    def _rotary(self, usual: Mapping[str, Any]) -> RotaryConfig:
        longest = self.size("max_position_embeddings", usual["max_position_embeddings"])
        given = any(self._left.get(name) is not None for name in ("rope_scaling", "rope_parameters"))
        theta = self("rope_theta", None)
        scaling, theta = self._rotary_section("rope_scaling", theta)
        parameters, theta = self._rotary_section("rope_parameters", theta)
        if scaling and parameters.get("rope_type", "default") != "default":
            agreed("rope_scaling", scaling, "rope_parameters", parameters)
        # What transformers takes where a config has both.
        used = (scaling or parameters) if given else usual["rope_scaling"]
        theta = _number("rope_theta", usual["rope_theta"] if theta is None else theta)
        try:
            _check_rotary_types(used)
            found = rotary_from_hf(used, max_position_embeddings=longest)
            if not np.isfinite(found.frequencies(_ANY_HEAD, theta)).all():
                raise ValueError("the frequencies that it gives are not finite")
        except (TypeError, ArithmeticError, ValueError) as error:
            raise ValueError(
                f"rope_scaling is {shown(used)} and rope_theta {theta}: {printable(str(error))}"
            ) from error
        return RotaryConfig(theta, None if isinstance(found, DefaultRotary) else found, longest)

    def _rotary_section(self, name: str, theta: Any) -> tuple[dict[str, Any], Any]:
        """`rope_scaling` or `rope_parameters`, and theta, which may be in it or beside it."""
        found = self(name, {})
        if not isinstance(found, Mapping):
            raise ValueError(f"{name} is {shown(found)}; a mapping with rope_type is expected.")
        found = dict(found)
        theta = agreed("rope_theta", theta, f"{name}.rope_theta", found.pop("rope_theta", None))
        kind, older = found.get("rope_type"), found.pop("type", None)
        kind = agreed(f"{name}.rope_type", kind, f"{name}.type", older)
        return found if kind is None else {**found, "rope_type": kind}, theta


def decoder_fields(config: DecoderConfig, vocab_size: int, *, dtype: str) -> dict[str, Any]:
    """The fields of `config.json` that `ConfigFields.decoder` reads."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.Mlp.size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.HeadDim.size,
        "hidden_act": "silu",
        "attention_bias": config.attention.bias,
        "max_position_embeddings": config.rotary.max_position_embeddings,
        "rope_theta": config.rotary.theta,
        "rope_scaling": rotary_to_hf(config.rotary.scaling),
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
    }


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


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} is {shown(value)}; a number that is not negative is expected.")
    return float(value)


def _check_rotary_types(parameters: Mapping[str, Any]) -> None:
    if not isinstance(parameters.get("rope_type", "default"), str):
        raise ValueError("rope_type is not a string")
    if not isinstance(parameters.get("truncate", True), bool):
        raise ValueError("truncate is not true or false")
    for name in _ROTARY_NUMBERS & parameters.keys():
        if parameters[name] is not None:
            _number(name, parameters[name])
