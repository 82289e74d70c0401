"""Weights of a decoder in Hugging Face's format: a folder into a decoder, and a decoder into a folder.

A folder holds `config.json` and safetensors files with one tensor a layer, and one an expert; the decoder
holds stacks. A linear map to or from heads has separate axes for them, where its tensor has a single one.
"""

import math
import re
from collections.abc import Callable, Mapping
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

from models.hf_io.formats import config_to_hf, format_of
from models.hf_io.safetensors_folder import Pending, SafetensorsFolder, WeightsError, write_safetensors
from models.hf_io.stacked_weights import Place, check_tensors, pending_tensors, read_array
from models.transformer.config import DecoderConfig
from models.transformer.decoder import Decoder
from stacked_remat import ScanCheckpointSpec
from stacked_remat.lora import LoraLinear, lora_linears

_FEW_TENSORS = 1000  # that take no time to list, and to name where they are missing


def read_decoder(
    root: Path,
    config: DecoderConfig,
    Vocab: Axis,
    *,
    remat: ScanCheckpointSpec = True,
    dtype: DTypeLike = "float32",
    sharding: Callable[[NamedArray], Sharding] | None = None,
) -> Decoder:
    """Reads a checkpoint into a decoder, a tensor at a time.

    Args:
        root: the folder.
        config: the architecture, as `read_hf_config` reads it from the folder's `config.json`.
        Vocab: axis of the embedding's rows, as many as the checkpoint has.
        remat: policy of every stack of layers.
        dtype: of all arrays.
        sharding: where an array of the decoder, given as its shape, is to be; None for the default device.

    Raises:
        FileNotFoundError: weights are missing.
        WeightsError: tensors are missing, unknown or misshapen, and nothing has been read.
        ConfigError: the policy has names that no layer has, or levels that can't cut the stacks.

    Cost: one tensor in host memory, besides the decoder itself.
    """
    folder = SafetensorsFolder.open(root)
    _check_separate_experts(folder, config)
    _check_size(folder, config, Vocab)
    shapes = eqx.filter_eval_shape(Decoder.init, config, Vocab, remat=remat, key=jax.random.key(0))
    places = decoder_places(shapes)
    embedding = places[".embedding.weight"]
    head = replace(embedding, name=f"{format_of(config).tensor_names['head']}.weight")
    copied = config.tie_word_embeddings and head.name in folder.shapes
    check_tensors([*places.values(), *([head] if copied else [])], folder)
    if copied:
        _check_equal(folder, head.name, embedding.name)
    default = SingleDeviceSharding(jax.devices()[0])

    def read(path: Any, shape: NamedArray) -> NamedArray:
        own = default if sharding is None else sharding(shape)
        array = read_array(places[jax.tree_util.keystr(path)], folder.read, dtype, own)
        return NamedArray(array, shape.axes)

    return jax.tree_util.tree_map_with_path(read, shapes, is_leaf=is_named_array)


def write_decoder(
    root: Path,
    decoder: Decoder,
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
            f"The decoder has adapters ({', '.join(adapted[:3])}, ...), which this format can't hold. Merge "
            f"them first, with merge_lora, or write them alone, with save_adapters."
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


def decoder_places(decoder: Decoder) -> dict[str, Place]:
    """The tensors of a checkpoint for every array of a decoder, by the array's path; shapes are enough."""
    names = format_of(decoder.config).tensor_names
    firsts = np.cumsum([0, *(stack.Layers.size for stack in decoder.stacks)]).tolist()
    modules = jax.tree_util.tree_leaves_with_path(decoder, is_leaf=_is_module)
    places = {}
    for keys, module in modules:
        path, first = jax.tree_util.keystr(keys), 0
        parts = re.findall(r"\w+", path)
        if parts[0] == "stacks":
            first = firsts[int(parts[1])]
            parts = ["stacks", "stacked", *parts[3:]]
        name = ".".join("{}" if part == "stacked" else names.get(part, part) for part in parts)
        for kind in ("weight", "bias"):
            named = getattr(module, kind, None)
            if named is not None:
                sizes = tuple(axis.size for axis in named.axes)
                stacked, layer_shape = sizes[: name.count("{}")], sizes[name.count("{}") :]
                shape = _tensor_shape(module, kind, layer_shape)
                place = Place(f"{path}.{kind}", f"{name}.{kind}", stacked, shape, layer_shape, first)
                places[place.path] = place
    return places


def _is_module(node: Any) -> bool:
    return isinstance(node, hnn.Linear | hnn.RmsNorm | hnn.Embedding)


def _tensor_shape(module: Any, kind: str, layer_shape: tuple[int, ...]) -> tuple[int, ...]:
    if kind == "bias" or isinstance(module, hnn.RmsNorm):
        return (math.prod(layer_shape),)
    rows = len(ensure_tuple(module.Out)) if isinstance(module, hnn.Linear) else 1
    return math.prod(layer_shape[:rows]), math.prod(layer_shape[rows:])


def num_tensors(config: DecoderConfig) -> int:
    """How many tensors a checkpoint of this architecture has, computed without a list of them."""
    total = 2 if config.tie_word_embeddings else 3
    for kind, Layers in config.stacks:
        attention = 6 + (4 if config.attention.bias else 0)
        mlp = 1 + 3 * config.sparse.num_experts if kind.sparse and config.sparse is not None else 3
        total += Layers.size * (2 + attention + mlp)
    return total


def _check_size(folder: SafetensorsFolder, config: DecoderConfig, Vocab: Axis) -> None:
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


def _check_separate_experts(folder: SafetensorsFolder, config: DecoderConfig) -> None:
    layout = format_of(config).experts_layout
    if fused := [name for name in folder.shapes if layout(name) == "fused"]:
        raise WeightsError(
            f"{folder.root} has the experts of a layer in one tensor, {fused[0]}. Load it with transformers "
            f"and save it again, save_pretrained(..., save_original_format=True), with a tensor an expert."
        )


def _check_equal(folder: SafetensorsFolder, head: str, embedding: str) -> None:
    """For tied embeddings, which some checkpoints hold twice."""
    if not np.array_equal(folder.read(head), folder.read(embedding)):
        raise WeightsError(
            f"{folder.root} has tie_word_embeddings, but its {head} is not its {embedding}. Set "
            f"tie_word_embeddings to false in its config.json to train them apart, or leave {head} out."
        )
