"""Weights of Qwen3 and Qwen3 MoE in Hugging Face's format, into a decoder and out of it.

A folder holds `config.json` and safetensors files with one tensor a layer, and one an expert; the decoder
holds stacks. Shapes differ in one other way: a decoder's head axes are apart, a checkpoint's are one.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import equinox as eqx
import haliax.nn as hnn
import jax
import numpy as np
from haliax import Axis, NamedArray
from haliax.util import ensure_tuple, is_named_array
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import DTypeLike

from models.pretrained import pretrained_config, read_pretrained
from models.qwen3_moe.config import Qwen3Architecture, Qwen3MoeConfig
from models.qwen3_moe.decoder import Qwen3Decoder
from models.qwen3_moe.hf_config import config_to_hf, read_hf_config
from models.safetensors_folder import Pending, SafetensorsFolder, WeightsError, write_safetensors
from models.stacked_weights import Place, check_tensors, pending_tensors, read_array
from stacked_remat import ScanCheckpointSpec
from stacked_remat.lora import LoraLinear, lora_linears

_NAMES = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "router": "gate",
}
"""What Hugging Face calls the parts of a layer that have other names here."""

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_RENAMED = re.compile("|".join(rf"\b{name}\b" for name in _NAMES))


def read_decoder(
    root: Path,
    config: Qwen3Architecture,
    Vocab: Axis,
    *,
    remat: ScanCheckpointSpec = True,
    dtype: DTypeLike = "float32",
    sharding: Callable[[NamedArray], Sharding] | None = None,
) -> Qwen3Decoder:
    """Reads a checkpoint into a decoder, a tensor at a time.

    Args:
        root: the folder.
        config: the architecture, as `config_from_hf` reads it from the folder's `config.json`.
        Vocab: axis of the embedding's rows, as many as the checkpoint has.
        remat: policy of every stack of layers.
        dtype: of all arrays.
        sharding: where an array of the decoder, given as its shape, is to be; None for the default device.

    Raises:
        FileNotFoundError: weights are missing.
        WeightsError: tensors are missing, unknown or misshapen, and nothing has been read.
        ConfigError: the policy names what no layer has, or cuts no stack as it says.

    Cost: one tensor in host memory, besides the decoder itself.
    """
    folder = SafetensorsFolder.open(root)
    _refuse_fused_experts(folder)
    _refuse_another_size(folder, config, Vocab)
    shapes = eqx.filter_eval_shape(Qwen3Decoder.init, config, Vocab, remat=remat, key=jax.random.key(0))
    places = decoder_places(shapes)
    copied = config.tie_word_embeddings and _HEAD in folder.shapes
    head = [replace(places[".embedding.weight"], names=(_HEAD,))] if copied else []
    check_tensors([*places.values(), *head], folder)
    if copied:
        _refuse_another_head(folder)
    default = SingleDeviceSharding(jax.devices()[0])

    def read(path: Any, shape: NamedArray) -> NamedArray:
        own = default if sharding is None else sharding(shape)
        array = read_array(places[jax.tree_util.keystr(path)], folder.read, dtype, own)
        return NamedArray(array, shape.axes)

    return jax.tree_util.tree_map_with_path(read, shapes, is_leaf=is_named_array)


def write_decoder(
    root: Path,
    decoder: Qwen3Decoder,
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
    texts: Mapping[str, str] = MappingProxyType({}),
    max_file_bytes: int = 5 * 2**30,
) -> None:
    """Writes a decoder as a checkpoint that Hugging Face's `from_pretrained` loads, in the decoder's dtype.

    Args:
        root: a folder that does not exist or is empty; it takes its name when all is written.
        decoder: without adapters: merge these first.
        fields: further ones of `config.json`, such as `eos_token_id`.
        texts: contents of further files, such as the tokenizer's, by their names.
        max_file_bytes: where a file ends and the next begins.

    Raises:
        FileExistsError: there is something in the folder.
        WeightsError: the decoder has adapters, or parts on devices of other processes.

    Cost: the host memory of one file.
    """
    adapted = [path for path, one in lora_linears(decoder).items() if isinstance(one, LoraLinear)]
    if adapted:
        raise WeightsError(
            f"The decoder has adapters ({', '.join(adapted[:3])}, ...), which this format has no place for. "
            f"Merge them first, with merge_lora, or write them alone, with save_adapters."
        )
    places = decoder_places(decoder)
    pending: dict[str, Pending] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(decoder, is_leaf=is_named_array):
        pending |= pending_tensors(places[jax.tree_util.keystr(path)], leaf.array)
    dtype = decoder.embedding.weight.dtype
    document = config_to_hf(decoder.config, decoder.Vocab.size, dtype=str(dtype)) | dict(fields)
    write_safetensors(
        root, pending, documents={"config.json": document}, texts=texts, max_file_bytes=max_file_bytes
    )


def decoder_places(decoder: Qwen3Decoder) -> dict[str, Place]:
    """The tensors of a checkpoint for every array of a decoder, by the array's path; shapes are enough."""
    places = _places(decoder.embedding, ".embedding", ("model.embed_tokens",), ())
    first = 0
    for number, stack in enumerate(decoder.stacks):
        layers = range(first, first + stack.Layers.size)
        for path, module in _modules(stack.stacked):
            name = _RENAMED.sub(lambda found: _NAMES[found[0]], path.removeprefix("."))
            names = [f"model.layers.{layer}.{name}" for layer in layers]
            stacked = (len(layers),)
            if ".stacked." in name:
                experts = stack.stacked.mlp.experts.Layers.size
                names = [one.replace("stacked", str(e)) for one in names for e in range(experts)]
                stacked = (len(layers), experts)
            places |= _places(module, f".stacks[{number}].stacked{path}", names, stacked)
        first += stack.Layers.size
    places |= _places(decoder.norm, ".norm", ("model.norm",), ())
    if decoder.head is not None:
        places |= _places(decoder.head, ".head", ("lm_head",), ())
    return places


def _places(
    module: hnn.Linear | hnn.RmsNorm | hnn.Embedding,
    path: str,
    names: Sequence[str],
    stacked: tuple[int, ...],
) -> dict[str, Place]:
    """The arrays of one module; `names` are what a checkpoint calls it, layer by layer, expert by expert."""
    places = {}
    for kind in ("weight", "bias"):
        named = getattr(module, kind, None)
        if named is not None:
            sizes = tuple(axis.size for axis in named.axes)
            assert sizes[: len(stacked)] == stacked, path
            layer_shape = sizes[len(stacked) :]
            matrix = kind == "weight" and not isinstance(module, hnn.RmsNorm)
            rows = (
                layer_shape[: len(ensure_tuple(module.Out))]
                if isinstance(module, hnn.Linear)
                else layer_shape[:1]
            )
            shape = (
                (math.prod(rows), math.prod(layer_shape[len(rows) :]))
                if matrix
                else (math.prod(layer_shape),)
            )
            tensors = tuple(f"{name}.{kind}" for name in names)
            places[f"{path}.{kind}"] = Place(f"{path}.{kind}", tensors, stacked, shape, layer_shape)
    return places


def _modules(tree: Any) -> list[tuple[str, Any]]:
    """The linear maps and norms of a tree, with their paths."""

    def is_module(node: Any) -> bool:
        return isinstance(node, hnn.Linear | hnn.RmsNorm)

    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_module)
    return [(jax.tree_util.keystr(path), module) for path, module in found]


def num_tensors(config: Qwen3Architecture) -> int:
    """How many tensors a checkpoint of this architecture has, computed without a list of them."""
    total = 2 if config.tie_word_embeddings else 3
    for kind, Layers in config.stacks:
        attention = 6 + (4 if config.attention.bias else 0)
        mlp = 1 + 3 * config.sparse.num_experts if kind.sparse and config.sparse is not None else 3
        total += Layers.size * (2 + attention + mlp)
    return total


def _refuse_another_size(folder: SafetensorsFolder, config: Qwen3Architecture, Vocab: Axis) -> None:
    """Refuses a config of another order of magnitude before its stacks or a list of its tensors are made."""
    num_weights = config.num_weights(Vocab.size)
    found = sum(math.prod(shape) for shape in folder.shapes.values())
    if num_weights > 100 * (found + 2**20):
        raise WeightsError(
            f"The config describes a model of {num_weights:,} weights, and the tensors in {folder.root} have "
            f"{found:,}. Check that the model's config is the checkpoint's own."
        )
    expected, there = num_tensors(config), len(folder.shapes) + len(folder.absent)
    if expected > 2 * there + _FEW_TENSORS:
        raise WeightsError(
            f"The config describes a model of {expected:,} tensors, and {folder.root} has {there:,}. Check "
            f"that the model's config is the checkpoint's own."
        )


_FEW_TENSORS = 1000  # that take no time to list, and to name where they are missing


def _refuse_fused_experts(folder: SafetensorsFolder) -> None:
    fused = next((name for name in folder.shapes if name.endswith(".mlp.experts.gate_up_proj")), None)
    if fused is not None:
        raise WeightsError(
            f"{folder.root} has the experts of a layer in one tensor, {fused}. Load it with transformers and "
            f"save it again, save_pretrained(..., save_original_format=True), with a tensor an expert."
        )


def _refuse_another_head(folder: SafetensorsFolder) -> None:
    """For tied embeddings: some checkpoints hold them twice, which is as good as once if they are equal."""
    if not np.array_equal(folder.read(_HEAD), folder.read(_EMBEDDING)):
        raise WeightsError(
            f"{folder.root} has tie_word_embeddings, but its {_HEAD} is not its {_EMBEDDING}. Set "
            f"tie_word_embeddings to false in its config.json to train them apart, or leave {_HEAD} out."
        )


@read_pretrained.register
def _read(
    config: Qwen3Architecture,
    root: Path,
    Vocab: Axis,
    *,
    remat: ScanCheckpointSpec,
    dtype: DTypeLike,
    sharding: Callable[[NamedArray], Sharding] | None = None,
) -> Qwen3Decoder:
    return read_decoder(root, config, Vocab, remat=remat, dtype=dtype, sharding=sharding)


@pretrained_config.register
def _pretrained_config(config: Qwen3Architecture, root: Path) -> tuple[Qwen3Architecture, int]:
    """The folder's, with the kernel, dtype, auxiliary losses and longer context that `config` asks for."""
    found, vocab_size = read_hf_config(root)
    found = replace(
        found,
        attention=replace(found.attention, backend=config.attention.backend),
        compute_dtype=config.compute_dtype,
        initializer_range=config.initializer_range,
    )
    if config.rotary.scaling is not None:  # a longer context than the folder was made for
        longest = config.rotary.max_position_embeddings
        rotary = replace(found.rotary, scaling=config.rotary.scaling, max_position_embeddings=longest)
        found = replace(found, rotary=rotary)
    # A size that a config leaves to its default is no other than the same size given.
    if config.attention.head_dim is None and found.HeadDim.size * found.num_heads == found.hidden_dim:
        found = replace(found, attention=replace(found.attention, head_dim=None))
    if config.mlp_dim is None and found.Mlp == replace(found, mlp_dim=None).Mlp:
        found = replace(found, mlp_dim=None)
    if isinstance(config, Qwen3MoeConfig) and isinstance(found, Qwen3MoeConfig):
        names = ["load_balance_loss", "z_loss_weight"]
        if config.experts.load_balance_weight is not None:
            names.append("load_balance_weight")
        own = {name: getattr(config.experts, name) for name in names}
        found = replace(found, experts=replace(found.experts, **own))
    return found, vocab_size
