"""What PEFT calls the adapters of this decoder's linears."""

import re
from pathlib import Path
from typing import Literal, TypeAlias

from models.qwen3_moe.config import Qwen3Architecture
from models.qwen3_moe.decoder import Qwen3Decoder
from stacked_remat.lora import PeftNames, PeftParameter, load_peft, peft_tensor_names, save_peft

ExpertsLayout: TypeAlias = Literal["fused", "separate"]

_OF_A_LAYER = re.compile(r"stacks\.(\d+)\.\*\.(attention\.[qkvo]_proj|mlp\..+)")
_OF_AN_EXPERT = re.compile(r"mlp\.experts\.\*\.(gate|up|down)_proj")
_WITHOUT_ADAPTERS = {
    "embed_tokens": "the embedding is no linear, and only linears have adapters here",
    "lm_head": "this model has no head of its own, since its config has tie_word_embeddings",
}
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
    num_experts = config.sparse.num_experts if config.sparse is not None else 0

    def name(path: str, index: tuple[int, ...]) -> str | PeftParameter:
        if path == "head":
            return "lm_head"
        found = _OF_A_LAYER.fullmatch(path)
        if found is None:
            raise ValueError(f"{path} is no linear of the Qwen3 decoder.")
        layer = f"model.layers.{sum(sizes[: int(found[1])]) + index[0]}"
        block, _, projection = found[2].rpartition(".")
        if block == "attention":
            return f"{layer}.self_attn.{projection}"
        if projection == "router":
            # A parameter of a module that is no torch.nn.Linear.
            return PeftParameter(f"{layer}.mlp.gate", "weight")
        if block == "mlp":
            # Beside experts, PEFT takes a module of this name for one of theirs, but not its parameter.
            return (
                PeftParameter(f"{layer}.mlp.{projection}", "weight") if num_experts else f"{layer}.{found[2]}"
            )
        if _OF_AN_EXPERT.fullmatch(found[2]) is None:
            raise ValueError(f"{path} is no linear of the Qwen3 decoder.")
        return _of_expert(f"{layer}.mlp.experts", projection, index[1], num_experts, experts)

    return name


def _of_expert(
    module: str, projection: str, expert: int, num_experts: int, layout: ExpertsLayout
) -> str | PeftParameter:
    if layout == "separate":
        return f"{module}.{expert}.{projection}"
    if projection == "down_proj":
        return PeftParameter(module, "down_proj", expert, num_experts, order=1)
    part = ("gate_proj", "up_proj").index(projection)
    return PeftParameter(module, "gate_up_proj", expert, num_experts, part, parts=2)


def save_adapters(
    folder: Path, model: Qwen3Decoder, *, experts: ExpertsLayout = "fused", base_model: str | None = None
) -> None:
    """Writes the adapters of `model` for PEFT; see `stacked_remat.lora.save_peft` and `peft_names`."""
    names = peft_names(model.config, experts)
    save_peft(folder, model, names, base_model=base_model, task_type="CAUSAL_LM")


def load_adapters(model: Qwen3Decoder, folder: Path) -> Qwen3Decoder:
    """The model with the adapters in `folder`, whichever way those of experts are written.

    Raises:
        ValueError: they are of the embedding, or of a head that the model hasn't; or as `load_peft`.
    """
    tensors = peft_tensor_names(folder)
    for module, missing in _WITHOUT_ADAPTERS.items():
        if any(f".{module}." in name for name in tensors) and (module != "lm_head" or model.head is None):
            raise ValueError(
                f"{folder} has adapters of {module}: {missing}. Merge them with PEFT (merge_and_unload), "
                f"save the whole model and read that."
            )
    separate = any(_SEPARATE.search(name) for name in tensors)
    return load_peft(model, folder, peft_names(model.config, "separate" if separate else "fused"))
