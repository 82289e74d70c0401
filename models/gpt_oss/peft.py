"""PEFT's names of the adapters of gpt-oss decoders."""

from models.hf_io.formats import ExpertsLayout
from models.hf_io.peft_layers import names_of_layers
from models.transformer.config import DecoderConfig
from stacked_remat.lora import PeftNames, PeftParameter


def peft_names(config: DecoderConfig, experts: ExpertsLayout = "fused") -> PeftNames:
    """The names of Hugging Face's gpt-oss, for `save_peft` and `load_peft`.

    Args:
        config: of the decoder.
        experts: `fused`, the only layout, in which the adapters of gate and up become one of twice the rank
            in `gate_up_proj`, with the product unchanged.

    Returns:
        A function that raises `ValueError` for a path that is not of a linear map of this decoder.

    Raises:
        ValueError: another layout.
    """
    if experts != "fused":
        raise ValueError("The experts of a layer of a gpt_oss are two parameters: their layout is fused.")
    num_experts = config.sparse.num_experts if config.sparse is not None else 0

    def of_mlp(mlp: str, path: str, expert: int | None) -> PeftParameter | None:
        if path == "router":
            return PeftParameter(f"{mlp}.router", "weight")  # of a module other than torch.nn.Linear
        if expert is None:
            return None
        if path == "down_proj":
            return PeftParameter(f"{mlp}.experts", path, expert, num_experts, order=1)
        part = ("gate_proj", "up_proj").index(path)
        return PeftParameter(
            f"{mlp}.experts", "gate_up_proj", expert, num_experts, part, parts=2, interleaved=True
        )

    return names_of_layers(config, of_mlp)
