"""PEFT's names of the adapters of a decoder, but for those of its MLPs and experts."""

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from models.transformer.config import DecoderConfig
from stacked_remat.lora import PeftNames, PeftParameter

NamesOfMlp: TypeAlias = Callable[[str, str, int | None], str | PeftParameter | None]
"""(name of the layer's MLP, path in it or in one of its experts, number of the expert) to a name.

None if there is no such linear map."""

_OF_A_LAYER = re.compile(
    r"layers\.(?:(\w+)\.)?\*\.(?:attention\.([qkvo]_proj)|mlp\.(experts\.\*\.)?(router|(?:gate|up|down)_proj))"
)


def names_of_layers(config: DecoderConfig, of_mlp: NamesOfMlp) -> PeftNames:
    """The names, where layers are called `model.layers` and the head `lm_head`.

    Returns:
        A function that raises `ValueError` for a path that is not of a linear map of this decoder.
    """
    layers_of: dict[str | None, Sequence[int]] = {None: range(config.num_layers)}
    if len(config.kinds) > 1:
        layers_of = {kind.name: config.layers_of(kind.name) for kind in config.kinds}

    def name(path: str, index: tuple[int, ...]) -> str | PeftParameter:
        if path == "head":
            return "lm_head"
        found = _OF_A_LAYER.fullmatch(path)
        if found is not None and found[1] in layers_of:
            kind, attention, experts, projection = found.groups()
            layer = f"model.layers.{layers_of[kind][index[0]]}"
            if attention is not None:
                return f"{layer}.self_attn.{attention}"
            named = of_mlp(f"{layer}.mlp", projection, None if experts is None else index[1])
            if named is not None:
                return named
        raise ValueError(f"{path} is not a linear map of this decoder.")

    return name
