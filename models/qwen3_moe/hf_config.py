"""Between the `config.json` of Qwen3 and Qwen3 MoE in Hugging Face's format and a decoder's config.

Every field that changes what the model computes is honoured, or refused by name; fields that say nothing of
it are on a list, and any other is refused too, since nobody knows what it means.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from models.qwen3_moe.config import (
    AttentionConfig,
    ExpertsConfig,
    Qwen3Architecture,
    Qwen3Config,
    Qwen3MoeConfig,
    RotaryConfig,
)
from models.safetensors_folder import WeightsError, listed, plain, read_json_fields, shown
from stacked_remat.ops import (
    DefaultRotary,
    LinearRotary,
    Llama3Rotary,
    YarnRotary,
    rotary_from_hf,
    rotary_to_hf,
)

_WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_experts_implementation",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "do_sample",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_length",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)
"""Fields that do not change logits. `initializer_range` is read all the same, and `eos_token_id` where text
is generated.

`pad_token_id` does change a gradient: transformers gives the row of it none. Here padding is told by
weights and documents, and a token that is in the text is learnt.
"""

_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention_dropout": (0,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "add_cross_attention": (False,),
    "hidden_act": ("silu",),
    "pruned_heads": ({},),
    "qkv_bias": (False,),
    "quantization_config": (None,),
    "shared_expert_intermediate_size": (0,),
    "tie_encoder_decoder": (False,),
    "use_qk_norm": (True,),
}
"""Fields that change logits, with the values that the decoder has built in; null counts as absent."""

_MOST_LAYERS = 10_000
_MOST_STACKS = 500  # each is traced and compiled by itself, which takes tens of milliseconds
_LARGEST = float(np.finfo(np.float32).max)


def read_hf_config(root: Path) -> tuple[Qwen3Architecture, int]:
    """The architecture of a folder in Hugging Face's format, and the number of rows of its embedding.

    Raises:
        FileNotFoundError: there is no `config.json`.
        WeightsError: it is no JSON, not of a Qwen3 model, or asks for something that the decoder hasn't.
    """
    path = root / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no config.json in {root}; it says what the weights beside it mean."
        )
    document = read_json_fields(path)
    try:
        return config_from_hf(document)
    except ValueError as error:
        raise WeightsError(f"{path} can't be used: {error}") from error


def config_from_hf(document: Mapping[str, Any]) -> tuple[Qwen3Architecture, int]:
    """The architecture that a `config.json` describes, and its vocabulary's size.

    Raises:
        ValueError: another `model_type`; a field that is missing, unknown, or has a value that is not served.
    """
    entries = dict(document)
    model_type = entries.pop("model_type", None)
    if model_type not in ("qwen3", "qwen3_moe"):
        raise ValueError(f"model_type is {shown(model_type)}; qwen3 and qwen3_moe are read.")
    _refuse_other_values(entries)
    _check_dtype(_agreed("dtype", entries.get("dtype"), "torch_dtype", entries.get("torch_dtype")))
    take = _Taker(entries)
    num_layers = take.size("num_hidden_layers", at_most=_MOST_LAYERS)
    num_heads = take.size("num_attention_heads")
    common = {
        "hidden_dim": take.size("hidden_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(take, model_type, num_heads),
        "attention": _attention(take, model_type, num_layers),
        "mlp_dim": take.size("intermediate_size"),
        "rotary": _rotary(take),
        "rms_norm_eps": take.number("rms_norm_eps", 1e-6),
        "initializer_range": take.number("initializer_range", 0.02),
        "tie_word_embeddings": take.boolean("tie_word_embeddings", False),
    }
    vocab_size = take.size("vocab_size")
    if model_type == "qwen3_moe":
        config = Qwen3MoeConfig(**common, experts=_experts(take, num_layers))
    else:
        config = Qwen3Config(**common)
    if len(config.stacks) > _MOST_STACKS:
        raise ValueError(
            f"the kind of layer changes {len(config.stacks) - 1} times (layer_types, mlp_only_layers, "
            f"decoder_sparse_step); at most {_MOST_STACKS - 1} times is read."
        )
    unknown = sorted(name for name, value in entries.items() if value is not None)
    if unknown := [name for name in unknown if name not in _WITHOUT_EFFECT]:
        raise ValueError(
            f"{listed([plain(name) for name in unknown])}: fields that a {model_type} decoder does not know, "
            f"and so can't honour. Remove them if they do not change what the model computes."
        )
    return config, vocab_size


def config_to_hf(config: Qwen3Architecture, vocab_size: int, *, dtype: str) -> dict[str, Any]:
    """The `config.json` of a decoder, as `AutoModelForCausalLM` of transformers 4.51 and later reads it."""
    windowed = [config.kind_of(layer).window is not None for layer in range(config.num_layers)]
    document: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.Mlp.size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.HeadDim.size,
        "hidden_act": "silu",
        "attention_bias": config.attention.bias,
        "use_sliding_window": any(windowed),
        "sliding_window": config.attention.window if any(windowed) else None,
        "max_position_embeddings": config.rotary.max_position_embeddings,
        "rope_theta": config.rotary.theta,
        "rope_scaling": rotary_to_hf(config.rotary.scaling),
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
    }
    if isinstance(config, Qwen3MoeConfig):
        return document | _experts_to_hf(config, windowed)
    kinds = ["sliding_attention" if one else "full_attention" for one in windowed]
    first = windowed.index(True) if any(windowed) else config.num_layers
    return document | {"layer_types": kinds, "max_window_layers": first}


class _Taker:
    """Takes fields out of a config, each of its type, so that those left over are known.

    A field that is absent or null is its default, and without one (`...`) missing.
    """

    def __init__(self, entries: dict[str, Any]):
        self._entries = entries

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __call__(self, name: str, default: Any = ...) -> Any:
        """The field, of any type.

        Raises:
            ValueError: it is missing.
        """
        value = self._entries.pop(name, None)
        if value is None and default is ...:
            raise ValueError(f"{name} is missing.")
        return default if value is None else value

    def size(self, name: str, default: Any = ..., at_least: int = 1, at_most: int = 2**31 - 1) -> Any:
        """A whole number.

        Raises:
            ValueError: it is missing, something else, too small or too large.
        """
        value = self(name, default)
        if value is not None and (type(value) is not int or value < at_least):
            raise ValueError(f"{name} is {shown(value)}; a whole number of at least {at_least} is expected.")
        if value is not None and value > at_most:
            raise ValueError(f"{name} is {shown(value)}; a whole number of at most {at_most} is expected.")
        return value

    def number(self, name: str, default: float) -> float:
        """A number that is not negative.

        Raises:
            ValueError: it is something else.
        """
        return _number(name, self(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        """`true` or `false`.

        Raises:
            ValueError: it is something else.
        """
        value = self(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shown(value)}; true or false is expected.")
        return value

    def sequence(self, name: str, kind: type, default: Any) -> Any:
        """A list whose entries are all of one type.

        Raises:
            ValueError: it is something else.
        """
        value = self(name, default)
        if value is not None and not (
            isinstance(value, list | tuple) and all(type(entry) is kind for entry in value)
        ):
            raise ValueError(f"{name} is {shown(value)}; a list of {kind.__name__} is expected.")
        return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} is {shown(value)}; a number that is not negative is expected.")
    return float(value)


def _num_kv_heads(take: _Taker, model_type: str, num_heads: int) -> int:
    """Where nothing is said, what `Qwen3Config` and `Qwen3MoeConfig` of transformers take."""
    name = "num_key_value_heads"
    if name not in take:
        return 32 if model_type == "qwen3" else 4
    return take.size(name, num_heads if model_type == "qwen3" else ...)


def _refuse_other_values(entries: dict[str, Any]) -> None:
    for name, served in _REQUIRED_VALUES.items():
        value = entries.pop(name, None)
        value = served[0] if value is None else value
        # False == 0, and yet one is a switch and the other a number.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in served):
            raise ValueError(
                f"{name} is {shown(value)}; the decoder has {served[0]!r} built in and nothing else."
            )


def _agreed(name: str, value: Any, alias: str, other: Any) -> Any:
    """The value of a thing that has two names; None where neither is given."""
    if value is not None and other is not None and value != other:
        raise ValueError(
            f"{name} is {shown(value)} and {alias} is {shown(other)}, and both are names of one thing. "
            f"Correct the one that is wrong, or leave it out."
        )
    return other if value is None else value


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype is {shown(dtype)}; one of {', '.join(_DTYPES)} is expected.")


_DTYPES = ("float32", "bfloat16", "float16", "float64")


def _attention(take: _Taker, model_type: str, num_layers: int) -> AttentionConfig:
    window = take.size("sliding_window", None if "sliding_window" in take else 4096)
    if not take.boolean("use_sliding_window", False):
        window = None
    first = take.size(
        "max_window_layers", 28, at_least=0
    )  # of dense models; the others have windows in all layers or in none
    kinds = take.sequence("layer_types", str, None)
    if kinds is None:
        full = first if model_type == "qwen3" else 0
        kinds = ["sliding_attention" if window and i >= full else "full_attention" for i in range(num_layers)]
    strange = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if strange or len(kinds) != num_layers:
        raise ValueError(
            f"layer_types has {len(kinds)} entries for {num_layers} layers, of the kinds "
            f"{shown(sorted(set(kinds)))}; one of full_attention and sliding_attention is expected for each "
            f"layer."
        )
    windowed = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if windowed and window is None:
        raise ValueError(
            "layer_types has sliding_attention, but use_sliding_window and sliding_window don't."
        )
    if model_type == "qwen3_moe" and window is not None and len(windowed) < num_layers:
        raise ValueError(
            "layer_types has full_attention beside use_sliding_window; a qwen3_moe has a window in all "
            "layers or in none."
        )
    return AttentionConfig(
        head_dim=take.size("head_dim", 128 if model_type == "qwen3" else None),
        bias=take.boolean("attention_bias", False),
        window=window if windowed else None,
        windowed_layers=windowed if 0 < len(windowed) < num_layers else None,
    )


def _rotary(take: _Taker) -> RotaryConfig:
    longest = take.size("max_position_embeddings", 32_768)
    theta = take("rope_theta", None)
    scaling, theta = _turning(take, "rope_scaling", theta)
    parameters, theta = _turning(take, "rope_parameters", theta)
    if scaling and parameters.get("rope_type", "default") != "default":
        _agreed("rope_scaling", scaling, "rope_parameters", parameters)
    used = scaling or parameters  # what transformers takes where a config has both
    theta = _number("rope_theta", 10_000.0 if theta is None else theta)
    try:
        _check_rotary_types(used)
        found = rotary_from_hf(used, max_position_embeddings=longest)
        if not np.isfinite(found.frequencies(_ANY_HEAD, theta)).all():
            raise ValueError("the frequencies that it gives are not finite")
    except (TypeError, ArithmeticError, ValueError) as error:
        raise ValueError(
            f"rope_scaling is {shown(used)} and rope_theta {theta}: {plain(str(error))}"
        ) from error
    return RotaryConfig(
        theta=theta,
        scaling=None if isinstance(found, DefaultRotary) else found,
        max_position_embeddings=longest,
    )


_ANY_HEAD = 64


def _turning(take: _Taker, name: str, theta: Any) -> tuple[dict[str, Any], Any]:
    """One of the two sections that say how positions turn, and the base, which may be in it or beside it."""
    found = take(name, {})
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is {shown(found)}; a mapping with rope_type is expected.")
    found = dict(found)
    theta = _agreed("rope_theta", theta, f"{name}.rope_theta", found.pop("rope_theta", None))
    kind, older = found.get("rope_type"), found.pop("type", None)
    kind = _agreed(f"{name}.rope_type", kind, f"{name}.type", older)
    return found if kind is None else {**found, "rope_type": kind}, theta


def _check_rotary_types(parameters: Mapping[str, Any]) -> None:
    if not isinstance(parameters.get("rope_type", "default"), str):
        raise ValueError("rope_type is a text")
    if not isinstance(parameters.get("truncate", True), bool):
        raise ValueError("truncate is true or false")
    for name in _ROTARY_NUMBERS & parameters.keys():
        if parameters[name] is not None:
            _number(name, parameters[name])


_ROTARY_NUMBERS = {field.name for one in (LinearRotary, Llama3Rotary, YarnRotary) for field in fields(one)}
_ROTARY_NUMBERS -= {"truncate"}


def _experts(take: _Taker, num_layers: int) -> ExpertsConfig:
    step = take.size("decoder_sparse_step", 1)  # the distance of sparse layers
    dense = set(take.sequence("mlp_only_layers", int, []))
    if strange := sorted(layer for layer in dense if not 0 <= layer < num_layers):
        raise ValueError(f"mlp_only_layers names layer {shown(strange[0])}; there are 0 to {num_layers - 1}.")
    named, newer = (take.size(name, None) for name in ("num_experts", "num_local_experts"))
    num_experts = _agreed("num_experts", named, "num_local_experts", newer)
    if num_experts is None:
        raise ValueError("num_experts or num_local_experts is missing.")
    return ExpertsConfig(
        num_experts=num_experts,
        experts_per_token=take.size("num_experts_per_tok"),
        intermediate_dim=take.size("moe_intermediate_size"),
        norm_topk_prob=take.boolean("norm_topk_prob", False),
        load_balance_weight=take.number("router_aux_loss_coef", 0.001),
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
    )


def _experts_to_hf(config: Qwen3MoeConfig, windowed: list[bool]) -> dict[str, Any]:
    if any(windowed) and not all(windowed):
        raise WeightsError(
            "model.attention.windowed_layers: Hugging Face's Qwen3 MoE has a window in all layers or in "
            "none, so this decoder can't be written in its format."
        )
    experts = config.experts
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_dim,
        "norm_topk_prob": experts.norm_topk_prob,
        "router_aux_loss_coef": experts.load_balance_weight_used,
        "output_router_logits": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }
