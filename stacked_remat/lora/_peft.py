"""Reads and writes adapters in PEFT's format: `adapter_model.safetensors` and
`adapter_config.json`.

The model provides the names of its linears, as a function of a linear's path and its
index in its stacks.
"""

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
    pairs = {
        at: pair
        for path, linear in linears.items()
        for at, pair in _pairs(path, linear)
    }
    if not pairs:
        raise ValueError("The model has no adapters to save: apply_lora makes them.")
    found = ((name, target.assemble(pairs)) for name, target in targets.items())
    tensors = {name: pair for name, pair in found if pair is not None}
    arrays = {}
    for name, (a, b) in tensor_keys({name: targets[name] for name in tensors}).items():
        arrays |= {a: tensors[name].a, b: tensors[name].b}
    text = (
        json.dumps(describe(tensors, targets, base_model, task_type), indent=2) + "\n"
    )
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
    linears, settings = lora_linears(model), PeftSettings.read(folder)
    path, targets = adapter_file(folder, TENSORS_FILE), _targets(linears, names)
    # PEFT stores the weight of a head, which is in no stack, beside its adapter.
    heads = {
        name for name, target in targets.items() if not [*target.members.values()][0][1]
    }
    stored = {
        f"{PREFIX}{head}{kind}.weight" for head in heads for kind in ("", ".base_layer")
    }
    pairs: dict[Where, Pair] = {}
    with opened_safetensors(path) as file:
        shapes = {
            key: tuple(file.get_slice(key).get_shape())
            for key in file.keys()
            if key not in stored
        }
        keys = tensor_keys(_adapted(targets, settings, set(shapes)))
        problems = _problems(keys, shapes, targets, settings, linears)
        problems += float_problems(
            {key: file.get_slice(key).get_dtype() for key in shapes}
        )
        if problems:
            raise ValueError(
                f"The adapters in {path} do not fit the model:\n" + "\n".join(problems)
            )
        for name, (a, b) in keys.items():
            scale = settings.scale(targets[name].parameter)
            pairs |= targets[name].take_apart(
                Pair(file.get_tensor(a), file.get_tensor(b), scale)
            )
    return map_modules(
        model, LINEARS, lambda path, linear: _with_adapter(path, linear, pairs, dtype)
    )


def peft_tensor_names(folder: Path) -> list[str]:
    """The names of the tensors in a folder in PEFT's format.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: there is no `adapter_model.safetensors`.
        ValueError: it is truncated or not a safetensors file.
    """
    with opened_safetensors(adapter_file(folder, TENSORS_FILE)) as file:
        return list(file.keys())


def _targets(linears: Mapping[str, Any], names: PeftNames) -> dict[str, Target]:
    def places() -> Iterator[tuple[Where, PeftParameter, int, int]]:
        for path, linear in linears.items():
            stack, narrow, wide = _sizes(linear)
            for index in np.ndindex(stack):
                name = names(path, index)
                place = PeftParameter(name, "") if isinstance(name, str) else name
                yield (path, index), place, narrow, wide

    return find_targets(places())


def _sizes(linear: Any) -> tuple[tuple[int, ...], int, int]:
    """The sizes of the stacks around a linear, and how many inputs and outputs it
    has.
    """
    Stack, In, Out = axes_of(linear)
    return tuple(axis.size for axis in Stack), axis_size(In), axis_size(Out)


def _pairs(path: str, linear: Any) -> Iterator[tuple[Where, Pair]]:
    """The adapters of a linear; none if it has none."""
    if isinstance(linear, LoraLinear):
        stack, narrow, wide = _sizes(linear)
        a, b = (np.asarray(one.array, np.float32) for one in named_adapter(linear))
        a, b = a.reshape(*stack, narrow, -1), b.reshape(*stack, -1, wide)
        for index in np.ndindex(stack):
            yield (path, index), Pair(a[index].T, b[index].T, linear.scale)


def _with_adapter(
    path: str, linear: Any, pairs: Mapping[Where, Pair], dtype: DTypeLike
) -> Any:
    """The linear with its own adapters of `pairs`, if there are any."""
    stack, narrow, wide = _sizes(linear)
    own = {
        index: pairs[path, index]
        for index in np.ndindex(stack)
        if (path, index) in pairs
    }
    if not own:
        return linear
    rank = max(pair.a.shape[0] for pair in own.values())
    scale = max(pair.scale for pair in own.values())
    a, b = (
        np.zeros((*stack, narrow, rank), np.float32),
        np.zeros((*stack, rank, wide), np.float32),
    )
    for index, pair in own.items():
        a[index][:, : pair.a.shape[0]] = pair.a.T
        b[index][: pair.a.shape[0]] = pair.b.T
        b[index] *= pair.scale / scale
    (Stack, In, Out), Rank = axes_of(linear), Axis(RANK_AXIS, rank)
    of_a, of_b = (
        NamedArray(
            jnp.asarray(array.reshape([axis.size for axis in axes]), dtype), axes
        )
        for array, axes in ((a, (*Stack, *In, Rank)), (b, (*Stack, Rank, *Out)))
    )
    return lora_linear(linear, of_a, of_b, scale)


def _adapted(
    targets: Mapping[str, Target], settings: PeftSettings, keys: set[str]
) -> dict[str, Target]:
    """The targets with adapters: those named by the config, and those with tensors."""
    by_module: dict[str, dict[str, Target]] = {}
    for name, target in targets.items():
        by_module.setdefault(target.parameter.module, {})[name] = target
    adapted: dict[str, Target] = {}
    for own in by_module.values():
        named = {
            name: target
            for name, target in own.items()
            if settings.targets(target.parameter)
        }
        if not named and not keys.isdisjoint(
            key for pair in tensor_keys(own).values() for key in pair
        ):
            named = own
        adapted |= named
    return adapted


def _problems(
    keys: Mapping[str, tuple[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
    targets: Mapping[str, Target],
    settings: PeftSettings,
    linears: Mapping[str, Any],
) -> list[str]:
    expected: dict[str, tuple[int, ...]] = {}
    for name, (a, b) in keys.items():
        target = targets[name]
        rows = settings.rank(target.parameter) * target.parameter.size
        expected[a], expected[b] = (rows, target.narrow), (target.wide, rows)
    problems = entry_problems(expected, shapes)
    found = {path for name in keys for path, _ in targets[name].members.values()}
    lacking = {
        path: name
        for name, one in reversed([*targets.items()])
        for path, _ in one.members.values()
    }
    for path in (
        path
        for path in linears
        if isinstance(linears[path], LoraLinear) and path not in found
    ):
        problems.append(
            f"missing: {path} has an adapter, the file has none for {lacking[path]}"
        )
    return problems
