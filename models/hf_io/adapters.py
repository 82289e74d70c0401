"""Adapters of a decoder in PEFT's format."""

from pathlib import Path

from models.hf_io.formats import ExpertsLayout, format_of
from models.transformer.decoder import Decoder
from stacked_remat.lora import load_peft, peft_tensor_names, save_peft

_MISSING = {
    "embedding": "the embedding is not a linear map, and only these have adapters here",
    "head": "this model has no head of its own, since its config has tie_word_embeddings",
}


def save_adapters(
    folder: Path, model: Decoder, *, experts: ExpertsLayout = "fused", base_model: str | None = None
) -> None:
    """Writes the adapters of `model` for PEFT; see `stacked_remat.lora.save_peft`."""
    names = format_of(model.config).peft_names(model.config, experts)
    save_peft(folder, model, names, base_model=base_model, task_type="CAUSAL_LM")


def load_adapters(model: Decoder, folder: Path) -> Decoder:
    """The model with the adapters in `folder`, in either layout of experts.

    Raises:
        ValueError: they are of the embedding, or of a head that the model lacks; or as `load_peft`.
    """
    tensors, known = peft_tensor_names(folder), format_of(model.config)
    for part, missing in _MISSING.items():
        module = known.tensor_names[part].rpartition(".")[2]
        if any(f".{module}." in name for name in tensors) and (part != "head" or model.head is None):
            raise ValueError(
                f"{folder} has adapters of {module}: {missing}. Merge them with PEFT (merge_and_unload), "
                f"save the whole model and read that."
            )
    layout = "separate" if "separate" in map(known.experts_layout, tensors) else "fused"
    return load_peft(model, folder, known.peft_names(model.config, layout))
