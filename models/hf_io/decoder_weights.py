"""Weights of a decoder in Hugging Face's format: a folder into a decoder, and a decoder
into a folder.

A folder holds `config.json` and safetensors files with one tensor a layer, and one an
expert or a few for all experts of a layer; the decoder stacks the layers of each kind.
A linear map to or from heads has separate axes for them, where its tensor has a single
one.
"""

import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import haliax.nn as hnn
import jax
from haliax import NamedArray
from haliax.util import ensure_tuple, is_named_array
from jax.sharding import SingleDeviceSharding

from models.hf_io.formats import HfFormat, config_to_hf, format_of
from models.hf_io.safetensors_folder import (
    SafetensorsFolder,
    WeightsError,
    weight_files,
    write_safetensors,
)
from models.hf_io.stacked_weights import (
    EntriesInFiles,
    ExpertsTensor,
    TensorMap,
    check_tensors,
    pending_tensors,
    read_array,
)
from models.hf_io.wiring import check_wiring
from models.parts.config import DecoderConfig
from models.parts.convolution import ShortConvolution
from models.parts.decoder import Decoder
from models.parts.mlp import FeedForward
from models.parts.norms import Norm
from stacked_remat import StackedPattern, streaming
from stacked_remat.lora import LoraLinear, lora_linears

T = TypeVar("T")


def read_decoder(root: Path, like: Decoder, *, in_files: bool = False) -> Decoder:
    """Reads a checkpoint into a decoder of these shapes, in their dtypes and shardings,
    a tensor at a time.

    Args:
        in_files: whether the weights of linear maps in layers but for routers, the
            embedding and the head stay in the files, from which each step reads a layer
            at a time; see `stacked_remat.streaming.from_files`. They are constant.

    Cost: one tensor in host memory, or where experts are fused those of one expert,
    besides the decoder.
    """
    folder = _text_tensors(root)
    known = format_of(like.config)
    folder = folder.renamed(known.read_name)
    # As some training code saves what transformers has in memory
    if any(name.endswith(".experts.gate_up_proj") for name in folder.shapes):
        known = known.in_memory
        folder = folder.renamed(known.loaded_name)
    elif known.joined:
        # Where transformers cuts such a tensor does not say whose a part is.
        folder = folder.joined(known.joined).renamed(known.loaded_name)
        known = replace(known, is_loaded=True)
    folder = _without_unused(
        _with_head_of(like.config, folder, known), like.config, known
    )
    folder = _without_copies(folder, _copies(like.config, known))
    maps = tensor_maps(like, known)
    # Before any is read: what is missing is said in a second.
    check_tensors([*maps.values()], folder)
    default = SingleDeviceSharding(jax.devices()[0])
    left = _read_by_layers(like) if in_files else frozenset()

    def read(keys: Any, shape: NamedArray) -> Any:
        path = jax.tree_util.keystr(keys)
        one = maps[path]
        if path in left:
            entries = EntriesInFiles(one, folder, shape.dtype)
            return streaming.from_files(shape, entries, stacked=len(one.stacked))
        sharding = getattr(shape.array, "sharding", None) or default
        array = read_array(one, folder.read, shape.dtype, sharding)
        return NamedArray(array, shape.axes)

    decoder = jax.tree_util.tree_map_with_path(read, like, is_leaf=is_named_array)
    if not in_files:
        return decoder
    if like.config.tiles == 1:
        return _with_products_in_files(decoder)
    # Tiles of attention cut the axes of linear maps, and need weights in memory; those
    # of what maps each token by itself are of positions.
    return jax.tree.map(
        lambda node: _with_products_in_files(node) if _is_by_token(node) else node,
        decoder,
        is_leaf=_is_by_token,
    )


def _is_by_token(node: Any) -> bool:
    return isinstance(node, FeedForward)


def _with_products_in_files(model: T) -> T:
    """The model with linear maps of layers that read their weight for each product; not
    those of experts, whose weights are read together.
    """

    def reading(node: Any) -> Any:
        is_of_layers = (
            isinstance(node, hnn.Linear)
            and streaming.is_in_files(node.weight)
            and node.weight.numbers.ndim == 1
        )
        return streaming.LinearInFiles.of(node) if is_of_layers else node

    return jax.tree.map(
        reading, model, is_leaf=lambda node: isinstance(node, hnn.Linear)
    )


def _read_by_layers(decoder: Decoder) -> frozenset[str]:
    """The paths of the weights that may stay in files: who uses them reads them
    first.
    """
    found = set()
    for keys, module in jax.tree_util.tree_leaves_with_path(
        decoder, is_leaf=_is_module
    ):
        path = jax.tree_util.keystr(keys)
        # A router may compute in another dtype.
        if isinstance(module, hnn.Linear | hnn.Embedding) and "router" not in path:
            found.add(f"{path}.weight")
    return frozenset(found)


def with_own_head(config: DecoderConfig, root: Path) -> DecoderConfig:
    """The config of a folder, untied with a warning if its files have a head that
    differs from the embedding.

    Transformers too keeps such a head. Where the files are not here yet the config is
    not changed.

    Cost: the headers are read, and embedding and head if a tied config has both.
    """
    if not config.tie_word_embeddings or not all(
        (root / file).is_file() for file in weight_files(root)
    ):
        return config
    if not _has_own_head(_text_tensors(root), format_of(config)):
        return config
    warnings.warn(
        f"{root}: config.json ties the head to the embedding, and the files have a head"
        " of other values, which is used. Write tie_word_embeddings: false in"
        " config.json.",
        stacklevel=2,
    )
    return replace(config, tie_word_embeddings=False)


def write_decoder(
    root: Path,
    decoder: Decoder,
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
    texts: Mapping[str, str] = MappingProxyType({}),
    max_file_bytes: int = 5 * 2**30,
) -> None:
    """Writes a decoder as a checkpoint that Hugging Face's `from_pretrained` loads, in
    the decoder's dtype.

    Args:
        decoder: without adapters: merge these first. Its layers have to be those that
            its format stands for; see `models.hf_io.wiring`.
        fields: further ones of `config.json`, such as `eos_token_id`.
        texts: contents of further files, such as the tokenizer's, by their names.
        max_file_bytes: as `write_safetensors` takes it.
    """
    assert not any(
        isinstance(one, LoraLinear) for one in lora_linears(decoder).values()
    ), "merge adapters"
    # Layers that were changed are not what the `model_type` says.
    check_wiring(format_of(decoder.config))
    known = format_of(decoder.config)
    maps = tensor_maps(decoder)
    leaves = jax.tree_util.tree_leaves_with_path(decoder, is_leaf=is_named_array)
    arrays = [(maps[jax.tree_util.keystr(path)], leaf.array) for path, leaf in leaves]
    copies = _copies(decoder.config, known)
    for copy, name in copies.items():
        ((original, array),) = [pair for pair in arrays if pair[0].name == name]
        arrays.append((replace(original, name=copy), array))
    pending = pending_tensors(arrays)
    dtype = decoder.embedding.weight.dtype
    document = config_to_hf(
        decoder.config, decoder.Vocab.size, dtype=str(dtype)
    ) | dict(fields)
    write_safetensors(
        root,
        pending,
        documents={"config.json": document},
        texts=texts,
        max_file_bytes=max_file_bytes,
    )


def tensor_maps(
    decoder: Decoder, known: HfFormat | None = None
) -> dict[str, TensorMap]:
    """The tensors of a checkpoint for every array of a decoder, by the array's path;
    shapes are enough.
    """
    known = known or format_of(decoder.config)
    is_mixed = isinstance(decoder.layers, StackedPattern)
    # Several linear maps may share one tensor.
    by_tensor: dict[Any, list[TensorMap]] = {}
    for keys, module in jax.tree_util.tree_leaves_with_path(
        decoder, is_leaf=_is_module
    ):
        path = jax.tree_util.keystr(keys)
        layers = None
        parts = [jax.tree_util.keystr((key,), simple=True) for key in keys]
        if parts[0] == "layers" and is_mixed:  # .layers.stacks['dense'].stacked
            layers = tuple(decoder.config.layers_of(parts[2]))
            parts = ["layers", *parts[3:]]
        is_further = parts[0] == "mtp"  # .mtp.stacked.layer.mlp
        if is_further:
            name, own_path = _further_name(known, parts[2:])
            layers = _further_layers(decoder.config, known)
        else:
            name, own_path = _tensor_name(known, parts)
        # A part of the only layer that predicts further tokens, without its number
        is_alone = is_further and "{}" not in name
        layers = None if is_alone else layers
        for kind, named in _arrays(module).items():
            sizes = tuple(axis.size for axis in named.axes)
            # A name has a number for each stacking axis: layers, experts.
            stacked = sizes[: name.count("{}")]
            layer_shape = sizes[name.count("{}") :]
            own_shape = layer_shape[1:] if is_alone else layer_shape
            shape = _tensor_shape(module, kind, own_shape)
            if (written := known.shapes.get(f"{own_path}{kind}")) is not None:
                rest = math.prod(shape)
                shape = tuple(rest if size == -1 else size for size in written)
            one = TensorMap(
                f"{path}{kind}",
                f"{name}{kind}",
                stacked,
                shape,
                layer_shape,
                layers,
                blocks=math.prod(layer_shape[: known.head_axes_of(own_path)]),
            )
            outer, _, _ = one.name.rpartition(".{}.")
            fused = known.fused.get(f"{own_path}{kind}")
            if fused is not None:  # a tensor of all experts
                shape = (stacked[-1], *(shape[::-1] if fused.transposed else shape))
                name_of_all = f"{outer}.{fused.name}"
                one = replace(
                    one,
                    name=name_of_all,
                    tensor_shape=shape,
                    transposed=fused.transposed,
                )
            one = replace(one, name=known.tensor_name(one.name))
            by_tensor.setdefault((one.name, layers, fused), []).append(one)
    return {
        part.path: part
        for (*_, fused), same in by_tensor.items()
        for part in _parts(same, fused)
    }


def _tensor_name(known: HfFormat, parts: Sequence[str]) -> tuple[str, str]:
    """The name of a module's tensors, with a `{}` for each stacking axis, and the
    module's path in a layer, or outside of layers in the decoder.
    """
    names = []
    path = []
    for part in parts:
        if part == "stacked":
            names.append("{}")
        elif part == "layers":
            names.append(known.name_of(part))
        else:
            path.append(part)
            names.append(known.name_of(".".join(path)))
    return ".".join(name for name in names if name), ".".join(path)


def _further_name(known: HfFormat, parts: Sequence[str]) -> tuple[str, str]:
    """`_tensor_name` of a module of an `MtpLayer`."""
    part, *below = parts
    if not below:
        return known.further[part], part
    name, path = _tensor_name(known, below)
    return f"{known.further[part]}.{name}", path


def _further_layers(config: DecoderConfig, known: HfFormat) -> tuple[int, ...]:
    """The numbers of the layers that predict further tokens, in names of tensors."""
    is_after_others = known.further["layer"].startswith(f"{known.name_of('layers')}.")
    first = config.num_layers if is_after_others else 0
    return tuple(range(first, first + config.further_tokens.trained_depths))


def _copies(config: DecoderConfig, known: HfFormat) -> dict[str, str]:
    """The tensors of layers that predict further tokens which are copies of others, and
    the names of those.
    """
    head = "embedding" if config.tie_word_embeddings else "head"
    of_parts = {"embedding": "embedding", "head": head}
    found = {}
    for part, original in of_parts.items():
        if part not in known.further:
            continue
        for number in _further_layers(config, known):
            copy = known.further[part].format(number)
            found[f"{copy}.weight"] = f"{known.name_of(original)}.weight"
    return found


def _parts(
    same: Sequence[TensorMap], fused: ExpertsTensor | None
) -> Iterator[TensorMap]:
    """The maps to the same tensors, each with its outputs of these."""
    axis = -1 if same[0].transposed else -len(same[0].matrix_shape)
    widths = [one.tensor_shape[axis] // one.blocks for one in same]
    for number, (one, stop) in enumerate(
        zip(same, itertools.accumulate(widths), strict=True)
    ):
        shape = [*one.tensor_shape]
        shape[axis] = sum(widths) * one.blocks
        outputs = slice(stop - widths[number], stop)
        if fused is not None and fused.interleaved:
            outputs = slice(number, None, len(same))
        yield (
            one
            if len(same) == 1
            else replace(one, tensor_shape=tuple(shape), outputs=outputs)
        )


def _text_tensors(root: Path) -> SafetensorsFolder:
    """The tensors of a folder, those of a text decoder in a larger model under the
    names that they have without it.
    """
    folder = SafetensorsFolder.open(root)
    return folder.renamed(
        lambda name: re.sub(r"^model\.language_model\.", "model.", name)
    )


def _has_own_head(folder: SafetensorsFolder, known: HfFormat) -> bool:
    head, embedding = (
        f"{known.name_of(part)}.weight" for part in ("head", "embedding")
    )
    return {head, embedding} <= folder.shapes.keys() and not folder.are_equal(
        head, embedding
    )


def _with_head_of(
    config: DecoderConfig, folder: SafetensorsFolder, known: HfFormat
) -> SafetensorsFolder:
    """The folder with the embedding under its name, if a tied config has only the head.

    Raises WeightsError for a tied config and a head that differs, and an untied config
    without a head.
    """
    head, embedding = (
        f"{known.name_of(part)}.weight" for part in ("head", "embedding")
    )
    if not config.tie_word_embeddings:
        if embedding in folder.shapes and head not in folder.shapes:
            raise WeightsError(
                f"{folder.root} has no {head}, and its config does not tie the head to"
                " the embedding. If they are one matrix, write tie_word_embeddings:"
                " true in config.json; else fetch it again."
            )
        return folder
    if head in folder.shapes and embedding not in folder.shapes:
        return folder.renamed(lambda name: embedding if name == head else name)
    if _has_own_head(folder, known):
        raise WeightsError(
            f"{folder.root} has {head}, which differs from {embedding}, and the model's"
            " config ties them. Write tie_word_embeddings: false; if the weights were"
            " fetched just now, run the command again."
        )
    return folder


def _without_unused(
    folder: SafetensorsFolder, config: DecoderConfig, known: HfFormat
) -> SafetensorsFolder:
    """The folder without tensors that transformers does not use either.

    These are rotary tables, the head where it is the embedding, and layers that predict
    further tokens, unless they are trained.
    """
    layer = re.compile(rf"{re.escape(known.name_of('layers'))}\.(\d+)\.")
    num_further = config.further_tokens.trained_depths
    num_read = config.num_layers + num_further
    names = known.further.values() if num_further else ()
    read = tuple(name.partition("{}")[0] for name in names)

    def is_used(name: str) -> bool:
        number = layer.match(name)
        is_further = (
            (known.further_layers or known.further)
            and number is not None
            and int(number[1]) >= num_read
        )
        is_tied = (
            config.tie_word_embeddings and name == f"{known.name_of('head')}.weight"
        )
        is_of_other_part = name.startswith(known.not_read) and not name.startswith(read)
        is_table = name.endswith(".rotary_emb.inv_freq")
        return not (is_further or is_tied or is_of_other_part or is_table)

    shapes = {name: shape for name, shape in folder.shapes.items() if is_used(name)}
    return replace(folder, shapes=shapes)


def _without_copies(
    folder: SafetensorsFolder, copies: Mapping[str, str]
) -> SafetensorsFolder:
    """The folder without tensors that are copies of others; a warning if one has other
    values.
    """
    for copy, name in copies.items():
        has_both = {copy, name} <= folder.shapes.keys()
        if has_both and not folder.are_equal(copy, name):
            warnings.warn(
                f"{folder.root}: {copy} has other values than {name}, which is used in"
                " its place.",
                stacklevel=3,
            )
    shapes = {
        name: shape for name, shape in folder.shapes.items() if name not in copies
    }
    return replace(folder, shapes=shapes)


def _is_module(node: Any) -> bool:
    modules = hnn.Linear | hnn.Embedding | Norm | ShortConvolution
    return isinstance(node, modules) or is_named_array(node)


def _arrays(module: Any) -> dict[str, NamedArray]:
    """The arrays of a module by what follows the module's name, which is nothing for a
    bare array.
    """
    if is_named_array(module):
        return {"": module}
    arrays = {f".{kind}": getattr(module, kind, None) for kind in ("weight", "bias")}
    return {kind: array for kind, array in arrays.items() if array is not None}


def _tensor_shape(
    module: Any, kind: str, layer_shape: tuple[int, ...]
) -> tuple[int, ...]:
    if kind != ".weight" or isinstance(module, Norm):
        return (math.prod(layer_shape),)
    if isinstance(module, ShortConvolution):
        # Of PyTorch's convolutions, whose channels read one channel each
        *channels, taps = layer_shape
        return math.prod(channels), 1, taps
    rows = len(ensure_tuple(module.Out)) if isinstance(module, hnn.Linear) else 1
    return math.prod(layer_shape[:rows]), math.prod(layer_shape[rows:])
