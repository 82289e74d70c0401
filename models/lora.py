"""Applies the `lora` section of a config to a language model."""

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from models.decoder.decoder import Decoder
from stacked_remat.lora import LoraConfig, LoraLinear, apply_lora, lora_filter
from stacked_remat.training import ConfigError, Trainable

_HEAD = "the loss takes the weights of the head by themselves, so that it can't have an adapter"
_EMBEDDING = "the embedding is not a linear map, and only these have adapters"
_WITHOUT_ADAPTERS = {"lm_head": _HEAD, "embed_tokens": _EMBEDDING, "embedding": _EMBEDDING}


def with_adapters(model: Decoder, lora: LoraConfig | None, *, key: PRNGKeyArray) -> tuple[Decoder, Trainable]:
    """The model to train, and which of its arrays: only adapters, or all without `lora`.

    Raises:
        ConfigError: a target matches no linear, or the head, whose weights the loss takes by themselves.
    """
    if lora is None:
        return model, eqx.is_inexact_array
    for target in lora.targets:
        if missing := _WITHOUT_ADAPTERS.get(target.rpartition(".")[2].strip("*")):
            raise ConfigError(
                f"Bad config: lora.targets: {target!r}: {missing}. Leave it out, or train the whole model, "
                f"without lora."
            )
    try:
        # Another key than the model's, so that adapters are independent of its weights.
        adapted = apply_lora(model, lora, key=jax.random.fold_in(key, 1))
    except ValueError as error:
        raise ConfigError(f"Bad config: {error}") from error
    try:
        eqx.filter_eval_shape(lambda model: model.unembedding(), adapted)
    except AttributeError as error:
        if not isinstance(error.obj, LoraLinear):
            raise
        raise ConfigError(f"Bad config: {error}") from error
    return adapted, lora_filter(adapted)
