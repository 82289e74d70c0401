"""Reads and writes adapters in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

The model provides the names of its linears, as a function of a linear's path and its index in its stacks.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import DTypeLike

from .._files import import_safetensors, opened_safetensors, replaced_whole, written_safetensors
from .._messages import entry_problems, float_problems
from ._adapter import (
    RANK_AXIS,
    LoraLinear,
    axes_of,
    lora_linear,
    lora_linears,
    named_adapter,
    replace_linears,
)
from ._peft_config import CONFIG_FILE, PeftSettings, adapter_file, describe
from ._peft_layout import (
    PREFIX,
    Members,
    Pair,
    PeftParameter,
    assemble,
    first_of,
    members_by_target,
    num_rows,
    take_apart,
    tensor_keys,
)

T = TypeVar("T")
Index: TypeAlias = tuple[int, ...]

PeftNames: TypeAlias = Callable[[str, Index], str | PeftParameter]
"""(path of a linear, index along the axes of its stacks) to the name of the module in Hugging Face's model,
or to the part of a parameter."""

TENSORS_FILE = "adapter_model.safetensors"


def save_peft(
    folder: Path,
    model: Any,
    names: PeftNames,
    *,
    base_model: str | None = None,
    task_type: str | None = None,
) -> None:
    """Write the adapters of `model` in PEFT's format, in float32, for `peft.PeftModel.from_pretrained`.

    Existing files are replaced, each whole or not at all. Axes of In and Out are flattened in their order.

    Args:
        folder: is created if needed.
        model: a model with adapters.
        names: the name of each linear in Hugging Face's model, adapted or not.
        base_model: name or folder of the base model, for PEFT's config.
        task_type: selects PEFT's class around the model, such as `CAUSAL_LM`; None for the generic one.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: there are no adapters, two linears have one name, or adapters can't share the tensors of a
            parameter.
        OSError: the folder can't be written to.

    Cost: one copy of the adapters in host memory.
    """
    safetensors = import_safetensors()
    linears = _linears(model, names)
    by_target = _by_target(linears)
    pairs = {member: pair for linear in linears for member, pair in linear.pairs().items()}
    if not pairs:
        raise ValueError("The model has no adapters to save: apply_lora makes them.")
    assembled = {target: assemble(members, pairs) for target, members in by_target.items()}
    tensors = {target: pair for target, pair in assembled.items() if pair is not None}
    adapted = {target: first_of(by_target[target]) for target in tensors}
    others = [target for target in by_target if target not in tensors]
    config = describe(tensors, adapted, others, base_model, task_type)
    arrays = {}
    for target, (a, b) in tensor_keys(adapted).items():
        arrays |= {a: tensors[target].a, b: tensors[target].b}
    text = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    with written_safetensors(folder):
        with replaced_whole(folder / TENSORS_FILE, shared=True) as path:
            safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
        with replaced_whole(folder / CONFIG_FILE, shared=True) as path:
            path.write_text(text, encoding="utf-8")


def load_peft(model: T, folder: Path, names: PeftNames, *, dtype: DTypeLike = jnp.float32) -> T:
    """Load adapters written by PEFT or `save_peft` into `model`.

    The result computes what PEFT's model computes in evaluation. Existing adapters are replaced, and linears
    without one are adapted if the files have one for them. Where ranks differ between the layers of a stack,
    they are padded with zeros to the largest. An adapter of a fused parameter (gate and up) becomes two, each
    with a copy of what it uses of A. The weight of a head, which PEFT stores beside its adapter, is not read.

    Args:
        model: the base model, or one with adapters.
        folder: has `adapter_model.safetensors` and `adapter_config.json`.
        names: the name of each linear in Hugging Face's model.
        dtype: of A and B.

    Raises:
        ImportError: safetensors is not installed.
        OSError: one of the files is missing or can't be read.
        ValueError: a file is truncated or of another format, the adapters are of a kind that LoraLinear does
            not have, or tensors are missing, unknown or of another shape: names all of them.
    """
    linears, settings = _linears(model, names), PeftSettings.read(folder)
    path, by_target = adapter_file(folder, TENSORS_FILE), _by_target(linears)
    with opened_safetensors(path) as file:
        heads = (f"{PREFIX}{linear.members[()].module}" for linear in linears if not linear.stack)
        stored = {f"{head}{kind}.weight" for head in heads for kind in ("", ".base_layer")}
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys() if key not in stored}
        keys = tensor_keys(_adapted(by_target, settings, set(shapes)))
        problems = _problems(keys, shapes, by_target, settings, linears)
        problems += float_problems({key: file.get_slice(key).get_dtype() for key in shapes})
        if problems:
            raise ValueError(f"The adapters in {path} do not fit the model:\n" + "\n".join(problems))
        pairs: dict[PeftParameter, Pair] = {}
        for target, (a, b) in keys.items():
            members = by_target[target]
            whole = Pair(file.get_tensor(a), file.get_tensor(b), settings.scale(first_of(members)))
            pairs |= take_apart(members, whole)
    found = ((linear.path, linear.adapted(pairs, dtype)) for linear in linears)
    return replace_linears(model, {path: new for path, new in found if new is not None})


def peft_tensor_names(folder: Path) -> list[str]:
    """The names of the tensors in a folder in PEFT's format.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: there is no `adapter_model.safetensors`.
        ValueError: it is truncated or not a safetensors file.
    """
    with opened_safetensors(adapter_file(folder, TENSORS_FILE)) as file:
        return list(file.keys())


@dataclass(frozen=True)
class _Linear:
    """One linear of the model, adapted or not, with the name of its matrix in each layer of its stacks."""

    path: str
    module: Any
    stack: tuple[int, ...]
    narrow: int
    wide: int
    members: Mapping[Index, PeftParameter] = field(repr=False)

    @property
    def wrapped(self) -> Any:
        """The module without its adapter."""
        return self.module.wrapped if isinstance(self.module, LoraLinear) else self.module

    def pairs(self) -> dict[PeftParameter, Pair]:
        """The adapters; empty if the linear has none."""
        if not isinstance(self.module, LoraLinear):
            return {}
        a, b = (np.asarray(one.array, np.float32) for one in named_adapter(self.module))
        a = np.swapaxes(a.reshape(*self.stack, self.narrow, -1), -1, -2)
        b = np.swapaxes(b.reshape(*self.stack, -1, self.wide), -1, -2)
        return {name: Pair(a[index], b[index], self.module.scale) for index, name in self.members.items()}

    def adapted(self, pairs: Mapping[PeftParameter, Pair], dtype: DTypeLike) -> LoraLinear | None:
        """The linear with its own adapters of `pairs`, None if there are none."""
        own = {index: pairs[member] for index, member in self.members.items() if member in pairs}
        if not own:
            return None
        rank = max(pair.a.shape[0] for pair in own.values())
        scale = max(pair.scale for pair in own.values())
        a = np.zeros((*self.stack, self.narrow, rank), np.float32)
        b = np.zeros((*self.stack, rank, self.wide), np.float32)
        for index, pair in own.items():
            a[index][:, : pair.a.shape[0]] = pair.a.T
            b[index][: pair.a.shape[0]] = pair.b.T
            b[index] *= pair.scale / scale
        (Stack, In, Out), Rank = axes_of(self.wrapped), Axis(RANK_AXIS, rank)
        of_a, of_b = _named(a, (*Stack, *In, Rank), dtype), _named(b, (*Stack, Rank, *Out), dtype)
        return lora_linear(self.wrapped, of_a, of_b, scale)


def _named(array: np.ndarray, axes: tuple[Axis, ...], dtype: DTypeLike) -> NamedArray:
    return NamedArray(jnp.asarray(array.reshape([axis.size for axis in axes]), dtype), axes)


def _linears(model: Any, names: PeftNames) -> list[_Linear]:
    found = []
    for path, module in lora_linears(model).items():
        axes = axes_of(module.wrapped if isinstance(module, LoraLinear) else module)
        stack = tuple(axis.size for axis in axes[0])
        narrow, wide = (math.prod(axis.size for axis in own) for own in axes[1:])
        members = {}
        for index in np.ndindex(stack):
            name = names(path, index)
            members[index] = PeftParameter(name, "") if isinstance(name, str) else name
        found.append(_Linear(path, module, stack, narrow, wide, members))
    return found


def _by_target(linears: Sequence[_Linear]) -> dict[str, Members]:
    return members_by_target(member for linear in linears for member in linear.members.values())


def _adapted(
    by_target: Mapping[str, Members], settings: PeftSettings, keys: set[str]
) -> dict[str, PeftParameter]:
    """The targets with adapters: those named by the config, and those with tensors."""
    by_module: dict[str, dict[str, PeftParameter]] = {}
    for target, members in by_target.items():
        one = first_of(members)
        by_module.setdefault(one.module, {})[target] = one
    adapted: dict[str, PeftParameter] = {}
    for targets in by_module.values():
        named = {target: member for target, member in targets.items() if settings.targets(member)}
        if not named and any(key in keys for pair in tensor_keys(targets).values() for key in pair):
            named = targets
        adapted |= named
    return adapted


def _problems(
    keys: Mapping[str, tuple[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
    by_target: Mapping[str, Members],
    settings: PeftSettings,
    linears: Sequence[_Linear],
) -> list[str]:
    sizes = {member: (one.narrow, one.wide) for one in linears for member in one.members.values()}
    expected: dict[str, tuple[int, ...]] = {}
    for target, (a, b) in keys.items():
        one = first_of(by_target[target])
        (narrow, wide), rows = sizes[one], settings.rank(one) * one.size
        expected[a], expected[b] = (rows, narrow), (num_rows(by_target[target], wide), rows)
    problems = entry_problems(expected, shapes)
    for linear in linears:
        without = [member.target for member in linear.members.values() if member.target not in keys]
        if isinstance(linear.module, LoraLinear) and len(without) == len(linear.members):
            problems.append(f"missing: {linear.path} has an adapter, the file has none for {without[0]}")
    return problems
