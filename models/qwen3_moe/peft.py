"""PEFT's names of the adapters of Qwen3 decoders."""

import re

from models.hf_io.formats import ExpertsLayout
from models.transformer.config import DecoderConfig
from stacked_remat.lora import PeftNames, PeftParameter

_OF_A_LAYER = re.compile(r"stacks\.(\d+)\.\*\.(attention\.[qkvo]_proj|mlp\..+)")
_OF_AN_EXPERT = re.compile(r"mlp\.experts\.\*\.(gate|up|down)_proj")


def peft_names(config: DecoderConfig, experts: ExpertsLayout = "fused") -> PeftNames:
    """The names of Hugging Face's Qwen3 and Qwen3 MoE, for `save_peft` and `load_peft`.

    Args:
        config: of the decoder.
        experts: the layout of experts. In `fused`, the adapters of gate and up become one of twice the rank
            in `gate_up_proj`, with the product unchanged, so that both or neither have to be adapted.

    Returns:
        A function that raises `ValueError` for a path that is not of a linear map of this decoder.
    """
    sizes = [Layers.size for _, Layers in config.stacks]
    num_experts = config.sparse.num_experts if config.sparse is not None else 0

    def name(path: str, index: tuple[int, ...]) -> str | PeftParameter:
        if path == "head":
            return "lm_head"
        found = _OF_A_LAYER.fullmatch(path)
        if found is None:
            raise ValueError(f"{path} is not a linear map of this decoder.")
        layer = f"model.layers.{sum(sizes[: int(found[1])]) + index[0]}"
        block, _, projection = found[2].rpartition(".")
        if block == "attention":
            return f"{layer}.self_attn.{projection}"
        if projection == "router":
            # A parameter of a module other than torch.nn.Linear.
            return PeftParameter(f"{layer}.mlp.gate", "weight")
        if block == "mlp":
            # Beside experts, PEFT takes a module of this name for one of theirs, but not its parameter.
            return (
                PeftParameter(f"{layer}.mlp.{projection}", "weight") if num_experts else f"{layer}.{found[2]}"
            )
        if _OF_AN_EXPERT.fullmatch(found[2]) is None:
            raise ValueError(f"{path} is not a linear map of this decoder.")
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
