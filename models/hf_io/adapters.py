"""Adapters of a decoder in PEFT's format."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
from haliax import Axis

from models.hf_io.decoder_weights import tensor_maps
from models.hf_io.formats import format_of
from models.hf_io.safetensors_folder import WeightsError
from models.parts.config import DecoderConfig
from models.parts.decoder import Decoder
from stacked_remat.lora import (
    PeftNames,
    PeftParameter,
    load_peft,
    peft_tensor_names,
    save_peft,
)


def save_adapters(
    folder: Path, model: Decoder, *, base_model: str | None = None
) -> None:
    """Writes the adapters of `model` for PEFT; see `stacked_remat.lora.save_peft`.

    Those of layers that predict further tokens are left out: transformers has no such
    layers.
    """
    model = dataclasses.replace(model, mtp=None)
    try:
        save_peft(
            folder,
            model,
            peft_names(model.config),
            base_model=base_model,
            task_type="CAUSAL_LM",
        )
    except ValueError as error:
        raise WeightsError(str(error)) from error


def load_adapters(model: Decoder, folder: Path) -> Decoder:
    """The model with the adapters in `folder`, in either layout of experts."""
    head = format_of(model.config).name_of("head")
    try:
        names = peft_tensor_names(folder)
        if model.head is None and any(f".{head}.lora_" in name for name in names):
            raise ValueError(
                f"they adapt {head}, which this model ties to the embedding. Train"
                " adapters without it, or untie it: tie_word_embeddings: false."
            )
        is_separate = any(re.search(r"\.experts\.\d+\.", name) for name in names)
        return load_peft(
            model,
            folder,
            peft_names(model.config, "separate" if is_separate else "fused"),
        )
    except (ValueError, re.error) as error:  # a pattern of modules may be no pattern
        raise WeightsError(
            f"The adapters in {folder} can't be used: {error}"
        ) from error


def peft_names(
    config: DecoderConfig, experts: Literal["fused", "separate"] = "fused"
) -> PeftNames:
    """The names of a decoder's linear maps in transformers' model, for `save_peft` and
    `load_peft`.

    Experts are `fused` in transformers 5: the adapters of gate and up become one of
    twice the rank in `gate_up_proj`, with the product unchanged. They are `separate` in
    files of transformers 4.
    """
    known = format_of(config)
    if experts == "fused":
        known = known.in_memory
    shapes = eqx.filter_eval_shape(
        Decoder.init, config, Axis("vocab", 1), key=jax.random.key(0)
    )
    swapped = {one.name for one in known.fused.values() if one.swapped}
    maps = {_dotted(path): one for path, one in tensor_maps(shapes, known).items()}

    def name(path: str, index: tuple[int, ...]) -> str | PeftParameter:
        one = maps[path]
        rows = None
        if one.outputs is not None:
            size = one.matrix_shape[-1 if one.transposed else 0]
            rows = one.outputs.indices(size // one.blocks)
        # A stack has layers of one kind; names have the numbers of all.
        if one.layers is not None:
            index = (one.layers[index[0]], *index[1:])
        outer = one.name.count("{}")
        module = known.loaded_name(
            one.name.format(*index[:outer]).removesuffix(".weight")
        )
        if outer < len(index):
            module, _, tensor = module.rpartition(".")
            # The order in which transformers' module defines its parameters
            order = int(tensor == "down_proj")
            return PeftParameter(
                module,
                tensor,
                index[1],
                one.stacked[1],
                order=order,
                rows=rows,
                swapped=tensor in swapped,
            )
        # PEFT adapts a router as a parameter; beside experts, it takes a module of an
        # MLP for one of theirs.
        beside = (
            config.sparse is not None and ".mlp." in path and ".experts." not in path
        )
        if not beside and rows is None:
            return module
        tensor = "weight" if beside else ""
        return PeftParameter(module, tensor, rows=rows, row_blocks=one.blocks)

    return name


def _dotted(path: str) -> str:
    """The path of a linear map, as adapters have it, from that of its weight."""
    parts = [
        "*" if part == "stacked" else part
        for part in re.findall(r"\w+", path)
        if part != "stacks"
    ]
    return ".".join(parts).removesuffix(".weight")
