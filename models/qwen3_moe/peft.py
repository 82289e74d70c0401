"""What PEFT calls the adapters of this decoder's linears."""

import re
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from models.qwen3_moe.config import Qwen3Architecture
from models.qwen3_moe.decoder import Qwen3Decoder
from stacked_remat.lora import PeftNames, PeftParameter, load_peft, peft_tensor_names, save_peft

ExpertsLayout: TypeAlias = Literal["fused", "separate"]
Model = TypeVar("Model", bound=Qwen3Decoder)

_IN_A_LAYER = re.compile(r"stacks\.(\d+)\.\*\.(.*)")
_ATTENTION = re.compile(r"attention\.([qkvo]_proj)")
_DENSE = re.compile(r"mlp\.(gate_proj|up_proj|down_proj)")
_EXPERTS = re.compile(r"mlp\.experts\.\*\.(gate|up|down)_proj")
_SEPARATE = re.compile(r"\.mlp\.experts\.\d+\.")


def peft_names(config: Qwen3Architecture, experts: ExpertsLayout = "fused") -> PeftNames:
    """The names of Hugging Face's Qwen3 and Qwen3 MoE, for `save_peft` and `load_peft`.

    Args:
        config: of the decoder.
        experts: how adapters of experts are written. `fused`: as PEFT writes them for transformers 5, whose
            experts are two parameters, `gate_up_proj` and `down_proj` (`target_parameters`). The adapters of
            gate and up become one of twice the rank, with the product unchanged. `separate`: a pair of
            tensors for every expert, `mlp.experts.7.up_proj`, as PEFT wrote them for transformers 4 and still
            reads them; gate and up have to be adapted both or neither.

    Returns:
        A function that raises `ValueError` for the path of a linear that is not this decoder's.
    """
    sizes = [Layers.size for _, Layers in config.stacks]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]

    def name(path: str, index: tuple[int, ...]) -> str | PeftParameter:
        if path == "head":
            return "lm_head"
        found = _IN_A_LAYER.fullmatch(path)
        if found is None:
            raise ValueError(f"{path} is no linear of the Qwen3 decoder.")
        return _in_layer(config, experts, firsts[int(found[1])] + index[0], found[2], index[1:])

    return name


def _in_layer(
    config: Qwen3Architecture, experts: ExpertsLayout, layer: int, path: str, index: tuple[int, ...]
) -> str | PeftParameter:
    module = f"model.layers.{layer}"
    if found := _ATTENTION.fullmatch(path):
        return f"{module}.self_attn.{found[1]}"
    if found := _DENSE.fullmatch(path):
        return f"{module}.mlp.{found[1]}"
    if path == "mlp.router":
        # A parameter of a module that is no torch.nn.Linear.
        return PeftParameter(f"{module}.mlp.gate", "weight")
    found = _EXPERTS.fullmatch(path)
    if found is None or config.sparse is None:
        raise ValueError(f"{path} is no linear of a layer of the Qwen3 decoder.")
    (expert,), size = index, config.sparse.num_experts
    if experts == "separate":
        return f"{module}.mlp.experts.{expert}.{found[1]}_proj"
    if found[1] == "down":
        return PeftParameter(f"{module}.mlp.experts", "down_proj", expert, size, order=1)
    part = ("gate", "up").index(found[1])
    return PeftParameter(f"{module}.mlp.experts", "gate_up_proj", expert, size, part, parts=2)


def save_adapters(
    folder: Path, model: Qwen3Decoder, *, experts: ExpertsLayout = "fused", base_model: str | None = None
) -> None:
    """Writes the adapters of `model` for PEFT; see `stacked_remat.lora.save_peft` and `peft_names`."""
    save_peft(folder, model, peft_names(model.config, experts), base_model=base_model)


def load_adapters(model: Model, folder: Path) -> Model:
    """The model with the adapters in `folder`, whichever way those of experts are written."""
    separate = any(_SEPARATE.search(name) for name in peft_tensor_names(folder))
    return load_peft(model, folder, peft_names(model.config, "separate" if separate else "fused"))
