"""What PEFT calls the adapters of this decoder's linears."""

import re
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from models.qwen3_moe.config import Qwen3MoeConfig
from models.qwen3_moe.decoder import Qwen3MoeDecoder
from stacked_remat.lora import PeftNames, PeftParameter, load_peft, peft_tensor_names, save_peft

ExpertsLayout: TypeAlias = Literal["fused", "separate"]
Model = TypeVar("Model", bound=Qwen3MoeDecoder)

_ATTENTION = re.compile(r"layers\.\*\.attention\.([qkvo]_proj)")
_EXPERTS = re.compile(r"layers\.\*\.experts\.experts\.\*\.(gate|up|down)_proj")
_SEPARATE = re.compile(r"\.mlp\.experts\.\d+\.")


def peft_names(config: Qwen3MoeConfig, experts: ExpertsLayout = "fused") -> PeftNames:
    """The names of Hugging Face's `Qwen3MoeForCausalLM`, for `save_peft` and `load_peft`.

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
    size = config.Experts.size

    def name(path: str, index: tuple[int, ...]) -> str | PeftParameter:
        if path == "head":
            return "lm_head"
        if found := _ATTENTION.fullmatch(path):
            return f"model.layers.{index[0]}.self_attn.{found[1]}"
        if path == "layers.*.experts.router":
            # A parameter of a module that is no torch.nn.Linear.
            return PeftParameter(f"model.layers.{index[0]}.mlp.gate", "weight")
        if found := _EXPERTS.fullmatch(path):
            layer, expert = index
            module = f"model.layers.{layer}.mlp.experts"
            if experts == "separate":
                return f"{module}.{expert}.{found[1]}_proj"
            if found[1] == "down":
                return PeftParameter(module, "down_proj", expert, size, order=1)
            part = ("gate", "up").index(found[1])
            return PeftParameter(module, "gate_up_proj", expert, size, part, parts=2)
        raise ValueError(f"{path} is no linear of the Qwen3 MoE decoder.")

    return name


def save_adapters(
    folder: Path, model: Qwen3MoeDecoder, *, experts: ExpertsLayout = "fused", base_model: str | None = None
) -> None:
    """Writes the adapters of `model` for PEFT; see `stacked_remat.lora.save_peft` and `peft_names`."""
    save_peft(folder, model, peft_names(model.config, experts), base_model=base_model)


def load_adapters(model: Model, folder: Path) -> Model:
    """The model with the adapters in `folder`, whichever way those of experts are written."""
    separate = any(_SEPARATE.search(name) for name in peft_tensor_names(folder))
    return load_peft(model, folder, peft_names(model.config, "separate" if separate else "fused"))
