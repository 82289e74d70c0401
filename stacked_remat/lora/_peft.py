"""Reads and writes adapters in PEFT's format: `adapter_model.safetensors` and
`adapter_config.json`.

A linear of a stack is one `LoraLinear` here, and in Hugging Face's model a module for
each layer and expert. So an adapter is split into a `Pair` for each index of its
stacks; the model provides the name of each, by the linear's path and the index. Pairs
of parts of one parameter (gate and up, or the experts of a layer) share two tensors, a
`Target` (`_peft_layout.py`). Reading goes the same way back.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray, axis_size
from jaxtyping import DTypeLike

from .._files import (
    import_safetensors,
    opened_safetensors,
    replaced_whole,
    written_safetensors,
)
from .._messages import entry_problems, float_problems
from .._paths import map_modules
from ._adapter import (
    LINEARS,
    RANK_AXIS,
    LoraLinear,
    axes_of,
    lora_linear,
    lora_linears,
    named_adapter,
)
from ._peft_config import CONFIG_FILE, PeftSettings, adapter_file, describe
from ._peft_layout import (
    PREFIX,
    Pair,
    PeftParameter,
    Target,
    Where,
    find_targets,
    tensor_keys,
)

T = TypeVar("T")
Index: TypeAlias = tuple[int, ...]

PeftNames: TypeAlias = Callable[[str, Index], str | PeftParameter]
"""(path of a linear, index along the axes of its stacks) to the name of the module in
Hugging Face's model, or to the part of a parameter."""

TENSORS_FILE = "adapter_model.safetensors"


def save_peft(
    folder: Path,
    model: Any,
    names: PeftNames,
    *,
    base_model: str | None = None,
    task_type: str | None = None,
) -> None:
    """Write the adapters of `model` in PEFT's format, in float32, for
    `peft.PeftModel.from_pretrained`.

    Existing files are replaced, each whole or not at all. Axes of In and Out are
    flattened in their order.

    Args:
        folder: is created if needed.
        model: a model with adapters.
        names: the name of each linear in Hugging Face's model, adapted or not.
        base_model: name (`owner/model`, `owner/model@revision`) or folder of the base,
            for PEFT's config.
        task_type: selects PEFT's class around the model, such as `CAUSAL_LM`; None for
            the generic one.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: there are no adapters, two linears have one name, or adapters can't
            share the tensors of a parameter.
        OSError: the folder can't be written to.

    Cost: one copy of the adapters in host memory.
    """
    safetensors = import_safetensors()
    linears = lora_linears(model)
    targets = _targets(linears, names)
    pairs: dict[Where, Pair] = {}
    for path, linear in linears.items():
        pairs.update(_pairs(path, linear))
    if not pairs:
        raise ValueError("The model has no adapters to save: apply_lora makes them.")
    tensors: dict[str, Pair] = {}
    adapted: dict[str, Target] = {}
    for name, target in targets.items():
        assembled = target.assemble(pairs)
        if assembled is not None:
            tensors[name] = assembled
            adapted[name] = target
    arrays = {}
    for name, (key_a, key_b) in tensor_keys(adapted).items():
        arrays[key_a] = tensors[name].a
        arrays[key_b] = tensors[name].b
    settings = describe(tensors, targets, base_model, task_type)
    text = json.dumps(settings, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    with written_safetensors(folder):
        with replaced_whole(folder / TENSORS_FILE, shared=True) as path:
            safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
        with replaced_whole(folder / CONFIG_FILE, shared=True) as path:
            path.write_text(text, encoding="utf-8")


def load_peft(
    model: T, folder: Path, names: PeftNames, *, dtype: DTypeLike = jnp.float32
) -> T:
    """Load adapters written by PEFT or `save_peft` into `model`.

    The result computes what PEFT's model computes in evaluation. Existing adapters are
    replaced, and linears without one are adapted if the files have one for them. Where
    ranks differ between the layers of a stack, they are padded with zeros to the
    largest. An adapter of a fused parameter (gate and up) becomes two, each with a copy
    of what it uses of A. The weight of a head, which PEFT stores beside its adapter, is
    not read.

    Args:
        model: the base model, or one with adapters.
        folder: has `adapter_model.safetensors` and `adapter_config.json`.
        names: the name of each linear in Hugging Face's model.
        dtype: of A and B.

    Raises:
        ImportError: safetensors is not installed.
        OSError: one of the files is missing or can't be read.
        ValueError: a file is truncated or of another format, the adapters are of a kind
            that LoraLinear does not have, or tensors are missing, unknown or of another
            shape: names all of them.
    """
    linears = lora_linears(model)
    settings = PeftSettings.read(folder)
    path = adapter_file(folder, TENSORS_FILE)
    targets = _targets(linears, names)
    not_read = _weights_of_heads(targets)
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    pairs: dict[Where, Pair] = {}
    with opened_safetensors(path) as file:
        for key in file.keys():
            if key not in not_read:
                tensor = file.get_slice(key)
                shapes[key] = tuple(tensor.get_shape())
                dtypes[key] = tensor.get_dtype()
        keys = tensor_keys(_adapted(targets, settings, set(shapes)))
        problems = _problems(keys, shapes, targets, settings, linears)
        problems += float_problems(dtypes)
        if problems:
            raise ValueError(
                f"The adapters in {path} do not fit the model:\n" + "\n".join(problems)
            )
        for name, (key_a, key_b) in keys.items():
            a = file.get_tensor(key_a)
            b = file.get_tensor(key_b)
            target = targets[name]
            scale = settings.scale(target.parameter)
            whole = Pair(a, b, scale)
            pairs.update(target.take_apart(whole))

    def adapt(path: str, linear: Any) -> Any:
        return _with_adapter(path, linear, pairs, dtype)

    return map_modules(model, LINEARS, adapt)


def peft_tensor_names(folder: Path) -> list[str]:
    """The names of the tensors in a folder in PEFT's format.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: there is no `adapter_model.safetensors`.
        ValueError: it is truncated or not a safetensors file.
    """
    with opened_safetensors(adapter_file(folder, TENSORS_FILE)) as file:
        return list(file.keys())


def _weights_of_heads(targets: Mapping[str, Target]) -> set[str]:
    """The names of weights of heads, which PEFT stores beside their adapters."""
    names = set()
    for name, target in targets.items():
        # All members of a target are in equal stacks; a head is in none.
        member, *_ = target.members.values()
        _, index = member
        if not index:
            names.add(f"{PREFIX}{name}.weight")
            names.add(f"{PREFIX}{name}.base_layer.weight")
    return names


def _targets(linears: Mapping[str, Any], names: PeftNames) -> dict[str, Target]:
    def places() -> Iterator[tuple[Where, PeftParameter, int, int]]:
        for path, linear in linears.items():
            stack, narrow, wide = _sizes(linear)
            for index in np.ndindex(stack):
                place = names(path, index)
                if isinstance(place, str):  # of a module
                    place = PeftParameter(place, "")
                yield (path, index), place, narrow, wide

    return find_targets(places())


def _sizes(linear: Any) -> tuple[tuple[int, ...], int, int]:
    """The sizes of the stacks around a linear, and how many inputs and outputs it
    has.
    """
    Stack, In, Out = axes_of(linear)
    stack = tuple(axis.size for axis in Stack)
    return stack, axis_size(In), axis_size(Out)


def _pairs(path: str, linear: Any) -> Iterator[tuple[Where, Pair]]:
    """The adapters of a linear; none if it has none."""
    if not isinstance(linear, LoraLinear):
        return
    stack, narrow, wide = _sizes(linear)
    named_a, named_b = named_adapter(linear)
    a = np.asarray(named_a.array, np.float32)
    b = np.asarray(named_b.array, np.float32)
    a = a.reshape(*stack, narrow, -1)
    b = b.reshape(*stack, -1, wide)
    for index in np.ndindex(stack):
        # Transposed, as PyTorch's linears have their weights
        pair = Pair(a[index].T, b[index].T, linear.scale)
        yield (path, index), pair


def _with_adapter(
    path: str, linear: Any, pairs: Mapping[Where, Pair], dtype: DTypeLike
) -> Any:
    """The linear with its own adapters of `pairs`, if there are any."""
    stack, narrow, wide = _sizes(linear)
    own: dict[Index, Pair] = {}
    for index in np.ndindex(stack):
        if (path, index) in pairs:
            own[index] = pairs[path, index]
    if not own:
        return linear
    # A stack has one rank and one scale. Columns of zeros change nothing, and B can
    # hold what a layer's own scale differs by.
    rank = max(pair.a.shape[0] for pair in own.values())
    scale = max(pair.scale for pair in own.values())
    a = np.zeros((*stack, narrow, rank), np.float32)
    b = np.zeros((*stack, rank, wide), np.float32)
    for index, pair in own.items():
        own_rank = pair.a.shape[0]
        a[index][:, :own_rank] = pair.a.T
        b[index][:own_rank] = pair.b.T
        b[index] *= pair.scale / scale
    Stack, In, Out = axes_of(linear)
    Rank = Axis(RANK_AXIS, rank)
    named_a = _named(a, (*Stack, *In, Rank), dtype)
    named_b = _named(b, (*Stack, Rank, *Out), dtype)
    return lora_linear(linear, named_a, named_b, scale)


def _named(array: np.ndarray, axes: tuple[Axis, ...], dtype: DTypeLike) -> NamedArray:
    shape = [axis.size for axis in axes]
    by_axis = array.reshape(shape)
    return NamedArray(jnp.asarray(by_axis, dtype), axes)


def _adapted(
    targets: Mapping[str, Target], settings: PeftSettings, keys: set[str]
) -> dict[str, Target]:
    """The targets with adapters: those named by the config, and those with tensors."""
    by_module: dict[str, dict[str, Target]] = {}
    for name, target in targets.items():
        by_module.setdefault(target.parameter.module, {})[name] = target
    adapted: dict[str, Target] = {}
    for own in by_module.values():
        named: dict[str, Target] = {}
        for name, target in own.items():
            if settings.targets(target.parameter):
                named[name] = target
        # Together, since the keys of a parameter depend on which others of its module
        # are adapted.
        keys_of_pairs = tensor_keys(own).values()
        own_keys = itertools.chain.from_iterable(keys_of_pairs)
        if not named and not keys.isdisjoint(own_keys):
            named = own
        adapted.update(named)
    return adapted


def _problems(
    keys: Mapping[str, tuple[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
    targets: Mapping[str, Target],
    settings: PeftSettings,
    linears: Mapping[str, Any],
) -> list[str]:
    """What is wrong with the tensors of a file, by their shapes."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, (key_a, key_b) in keys.items():
        target = targets[name]
        # Of all matrices of a parameter, one after the other
        rows = settings.rank(target.parameter) * target.parameter.size
        wide, narrow = target.shape
        expected[key_a] = (rows, narrow)
        expected[key_b] = (wide, rows)
    problems = entry_problems(expected, shapes)
    first_target: dict[str, str] = {}  # of a path
    found = set()
    for name, target in targets.items():
        for path, _ in target.members.values():
            first_target.setdefault(path, name)
            if name in keys:
                found.add(path)
    for path, linear in linears.items():
        # Such an adapter would stay beside those that are loaded.
        if isinstance(linear, LoraLinear) and path not in found:
            problems.append(
                f"missing: {path} has an adapter, the file has none for"
                f" {first_target[path]}"
            )
    return problems
