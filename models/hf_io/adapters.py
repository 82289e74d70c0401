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

from models.decoder.config import DecoderConfig, ExpertsConfig
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
            return _of_expert(known, parts, index, config.sparse)
        module = _module(known, parts, index)
        # PEFT adapts a router as a parameter; beside experts, it takes a module of an MLP for one of theirs.
        beside = config.sparse is not None and "mlp" in parts and "experts" not in parts
        rows = _rows(known, path, linears)
        if not beside and rows is None:
            return module
        return PeftParameter(module, "weight" if beside else "", rows=rows)

    return name


def _rows(known: HfFormat, path: str, linears: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """The rows of this linear map in one that transformers has for several; None where it has this one."""

    def module(path: str) -> tuple[str, str]:
        parent, _, own = path.rpartition(".")
        return parent, known.name_of(own)

    alike = [other for other in linears if module(other) == module(path)]
    widths = [math.prod(axis.size for axis in ensure_tuple(linears[other].Out)) for other in alike]
    start = sum(widths[: alike.index(path)])
    return None if len(alike) == 1 else (start, start + widths[alike.index(path)], 1)


def _module(known: HfFormat, parts: list[str], index: tuple[int, ...]) -> str:
    names = ".".join("{}" if part == "*" else known.name_of(part) for part in parts).format(*index)
    return ".".join(known.loaded.get(part, part) for part in names.split("."))


def _of_expert(
    known: HfFormat, parts: list[str], index: tuple[int, ...], experts: ExpertsConfig
) -> PeftParameter:
    module, wide = _module(known, parts[:-2], index[:1]), experts.intermediate_dim
    if parts[-1] == "down_proj":
        return PeftParameter(module, parts[-1], index[1], experts.num_experts, order=1)
    part = ("gate_proj", "up_proj").index(parts[-1])
    rows = (part, 2 * wide, 2) if known.fused else (part * wide, (part + 1) * wide, 1)
    return PeftParameter(module, "gate_up_proj", index[1], experts.num_experts, rows=rows)
