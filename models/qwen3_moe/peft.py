"""PEFT's names of the adapters of Qwen3 decoders."""

from models.hf_io.formats import ExpertsLayout
from models.hf_io.peft_layers import names_of_layers
from models.transformer.config import DecoderConfig
from stacked_remat.lora import PeftNames, PeftParameter


def peft_names(config: DecoderConfig, experts: ExpertsLayout = "fused") -> PeftNames:
    """The names of Hugging Face's Qwen3 and Qwen3 MoE, for `save_peft` and `load_peft`.

    Args:
        config: of the decoder.
        experts: the layout of experts. In `fused`, the adapters of gate and up become one of twice the rank
            in `gate_up_proj`, with the product unchanged, so that both or neither have to be adapted.

    Returns:
        A function that raises `ValueError` for a path that is not of a linear map of this decoder.
    """
    num_experts = config.sparse.num_experts if config.sparse is not None else 0

    def of_mlp(mlp: str, path: str, expert: int | None) -> str | PeftParameter | None:
        if path == "router":
            # A parameter of a module other than torch.nn.Linear.
            return PeftParameter(f"{mlp}.gate", "weight")
        if expert is None:
            # Beside experts, PEFT takes a module of this name for one of theirs, but not its parameter.
            return PeftParameter(f"{mlp}.{path}", "weight") if num_experts else f"{mlp}.{path}"
        return _of_expert(f"{mlp}.experts", path, expert, num_experts, experts)

    return names_of_layers(config, of_mlp)


def _of_expert(
    module: str, projection: str, expert: int, num_experts: int, layout: ExpertsLayout
) -> str | PeftParameter:
    if layout == "separate":
        return f"{module}.{expert}.{projection}"
    if projection == "down_proj":
        return PeftParameter(module, "down_proj", expert, num_experts, order=1)
    part = ("gate_proj", "up_proj").index(projection)
    return PeftParameter(module, "gate_up_proj", expert, num_experts, part, parts=2)
