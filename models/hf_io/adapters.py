"""Adapters of a decoder in PEFT's format."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
from haliax import Axis
from haliax.util import ensure_tuple

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.hf_io.formats import HfFormat, format_of
from stacked_remat.lora import (
    PeftNames,
    PeftParameter,
    load_peft,
    lora_linears,
    peft_tensor_names,
    save_peft,
)

_MISSING = {
    "embedding": "the embedding is not a linear map, and only these have adapters here",
    "head": "this model has no head of its own, since its config has tie_word_embeddings",
}


def save_adapters(folder: Path, model: Decoder, *, base_model: str | None = None) -> None:
    """Writes the adapters of `model` for PEFT; see `stacked_remat.lora.save_peft`."""
    save_peft(folder, model, peft_names(model.config), base_model=base_model, task_type="CAUSAL_LM")


def load_adapters(model: Decoder, folder: Path) -> Decoder:
    """The model with the adapters in `folder`, in either layout of experts.

    Raises:
        ValueError: they are of the embedding, or of a head that the model lacks; or as `load_peft`.
    """
    tensors, known = peft_tensor_names(folder), format_of(model.config)
    for part, missing in _MISSING.items():
        module = known.name_of(part).rpartition(".")[2]
        if any(f".{module}." in name for name in tensors) and (part != "head" or model.head is None):
            raise ValueError(
                f"{folder} has adapters of {module}: {missing}. Merge them with PEFT (merge_and_unload), "
                f"save the whole model and read that."
            )
    is_separate = any(re.search(r"\.experts\.\d+\.", name) for name in tensors)
    return load_peft(model, folder, peft_names(model.config, "separate" if is_separate else "fused"))


def peft_names(config: DecoderConfig, experts: Literal["fused", "separate"] = "fused") -> PeftNames:
    """The names of a decoder's linear maps in transformers' model, for `save_peft` and `load_peft`.

    Args:
        config: of the decoder.
        experts: `fused`, as transformers 5 has them: the adapters of gate and up become one of twice the rank
            in `gate_up_proj`, with the product unchanged. `separate`, as files of transformers 4 have them.

    Returns:
        A function that raises `ValueError` for a path that is not of a linear map of this decoder.
    """
    shapes = eqx.filter_eval_shape(Decoder.init, config, Axis("vocab", 1), key=jax.random.key(0))
    linears, known, is_mixed = lora_linears(shapes), format_of(config), len(config.kinds) > 1

    def name(path: str, index: tuple[int, ...]) -> str | PeftParameter:
        if path not in linears:
            raise ValueError(f"{path} is not a linear map of this decoder.")
        parts = path.split(".")
        if parts[0] == "layers" and is_mixed:
            index = (config.layers_of(parts.pop(1))[index[0]], *index[1:])
        if "experts" in parts and experts == "fused" and config.sparse is not None:
            module = _module(known, parts[:-2], index[:1])
            return _of_expert(module, parts[-1], index[1], config.sparse.num_experts, bool(known.fused))
        module = _module(known, parts, index)
        # PEFT adapts a router as a parameter; beside experts, it takes a module of an MLP for one of theirs.
        beside = config.sparse is not None and "mlp" in parts and "experts" not in parts
        parameter, (part, widths) = "weight" if beside else "", _part(known, path, linears)
        if len(widths) > 1:
            return PeftParameter(module, parameter, part=part, parts=len(widths), widths=widths)
        return PeftParameter(module, parameter) if beside else module

    return name


def _part(known: HfFormat, path: str, linears: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Which of the linear maps that transformers has as one this is, and the numbers of outputs of them."""

    def module(path: str) -> tuple[str, str]:
        parent, _, own = path.rpartition(".")
        return parent, known.name_of(own)

    alike = [other for other in linears if module(other) == module(path)]
    widths = (math.prod(axis.size for axis in ensure_tuple(linears[other].Out)) for other in alike)
    return alike.index(path), tuple(widths)


def _module(known: HfFormat, parts: list[str], index: tuple[int, ...]) -> str:
    names = ".".join("{}" if part == "*" else known.name_of(part) for part in parts).format(*index)
    return ".".join(known.loaded.get(part, part) for part in names.split("."))


def _of_expert(
    module: str, projection: str, expert: int, num_experts: int, interleaved: bool
) -> PeftParameter:
    if projection == "down_proj":
        return PeftParameter(module, projection, expert, num_experts, order=1)
    part = ("gate_proj", "up_proj").index(projection)
    return PeftParameter(module, "gate_up_proj", expert, num_experts, part, parts=2, interleaved=interleaved)
