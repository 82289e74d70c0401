"""Adapters in the files of Hugging Face's PEFT: `adapter_model.safetensors` and `adapter_config.json`.

What the linears are called there is for the model to say, by a function from a linear's path and its place in
the stacks it is in. That function is all that this module knows of a model.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import haliax.nn as hnn
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import DTypeLike

from ._adapter import RANK_AXIS, LoraLinear, linear_axes, lora_linears, replace_linears, stack_axes
from ._peft_config import CONFIG_FILE, PeftSettings, describe
from ._peft_layout import Assembled, Pair, PeftParameter, Place, assemble, places_of, take_apart, tensor_keys

T = TypeVar("T")
Index: TypeAlias = tuple[int, ...]

PeftNames: TypeAlias = Callable[[str, Index], str | PeftParameter]
"""(path of a linear, its index along the axes of its stacks) to the module, or the part of a parameter, that
Hugging Face's model has in its place."""

TENSORS_FILE = "adapter_model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
# PEFT ignores it: how the rank of each target is made up of those of its parts.
_PART_RANKS = "part_ranks"


def save_peft(
    folder: Path,
    model: Any,
    names: PeftNames,
    *,
    base_model: str | None = None,
    task_type: str | None = None,
) -> None:
    """Writes the adapters of `model` as PEFT does, in float32, for `peft.PeftModel.from_pretrained`.

    Files of these names that are there already are replaced, each whole or not at all. Axes of In and Out are
    flattened in their order.

    Args:
        folder: is made if need be.
        model: a model with adapters.
        names: what Hugging Face's model calls each linear, adapted or not.
        base_model: the name or folder of the model that the adapters belong to, for PEFT's config.
        task_type: the class of PEFT's that is to wrap the model, such as `CAUSAL_LM`; None for the plain one,
            which takes any module.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: no adapters, two linears of one name, or adapters that can't share a parameter's tensors.
        OSError: the folder can't be written to; it is removed if it was not there before.

    Cost: the adapters once, in the host's memory.
    """
    safetensors = _safetensors()
    linears = _linears(model, names)
    places = places_of([member for linear in linears for member in linear.members.values()])
    pairs: dict[str, dict[tuple[int, int], Pair]] = {}
    for linear in linears:
        for member, pair in linear.pairs().items():
            pairs.setdefault(member.target, {})[member.part, member.index] = pair
    if not pairs:
        raise ValueError("The model has no adapters to save: apply_lora makes them.")
    tensors: dict[str, Assembled] = {target: assemble(places[target], pairs[target]) for target in pairs}
    members = {target: _some(places[target]) for target in tensors}
    others = [target for target in places if target not in tensors]
    config = describe(tensors, members, others, base_model, task_type)
    ranks = {target: tensor.part_ranks for target, tensor in tensors.items() if len(tensor.part_ranks) > 1}
    arrays: dict[str, np.ndarray] = {}
    for target, (a, b) in tensor_keys(members).items():
        arrays[a], arrays[b] = tensors[target].a, tensors[target].b
    metadata = {"format": "pt", _PART_RANKS: json.dumps(ranks)}
    text = json.dumps(config, indent=2) + "\n"
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _replace(folder / TENSORS_FILE, lambda path: safetensors.save_file(arrays, path, metadata=metadata))
        _replace(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))
    except (safetensors.error, OSError) as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        code = re.search(r"os error (\d+)", str(error))  # which safetensors says in its text alone
        number = int(code[1]) if code else getattr(error, "errno", None) or errno.EIO
        raise OSError(number, os.strerror(number), str(folder)) from error


def load_peft(model: T, folder: Path, names: PeftNames, *, dtype: DTypeLike = jnp.float32) -> T:
    """Puts the adapters that PEFT has written, or `save_peft`, into `model`.

    The result computes what PEFT's model computes in evaluation. Linears that have an adapter get the file's;
    those that have none are adapted where the file says so. Layers of one stack whose ranks differ are filled
    up with zeros to the largest. Adapters of a fused parameter that were trained as one (gate and up) become
    two with a copy of their common A.

    Args:
        model: the base model, or one with adapters.
        folder: has `adapter_model.safetensors` and `adapter_config.json`.
        names: what Hugging Face's model calls each linear.
        dtype: of A and B.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: one of the files is missing.
        ValueError: a file that is cut short or of another format; a kind of adapter that LoraLinear is not;
            or tensors that are missing, that no linear has, or of another shape: all of them are named, and
            the model is as it was.
    """
    linears = _linears(model, names)
    members = [member for linear in linears for member in linear.members.values()]
    settings, path, places = PeftSettings.read(folder, members), _tensors_file(folder), places_of(members)
    with _opened(path) as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
        keys = tensor_keys(_adapted(places, settings, set(shapes)))
        dtypes = {key: file.get_slice(key).get_dtype() for key in shapes}
        problems = _problems(keys, shapes, places, settings, linears)
        problems += [
            f"not a float that is read: {_plain(key)} is {dtype}, expected one of {', '.join(_FLOATS)}"
            for key, dtype in dtypes.items()
            if dtype not in _FLOATS
        ]
        if problems:
            raise ValueError(f"The adapters in {path} do not fit the model:\n" + "\n".join(problems))
        part_ranks = _part_ranks(path, file.metadata() or {})
        pairs: dict[PeftParameter, Pair] = {}
        for target, (a, b) in keys.items():
            place, scale = places[target], settings.scale(_some(places[target]))
            ranks = part_ranks.get(target)
            if ranks is not None and sum(ranks) != settings.rank(_some(place)):
                ranks = None  # written anew by something that knows nothing of parts
            for at, pair in take_apart(place, file.get_tensor(a), file.get_tensor(b), scale, ranks).items():
                pairs[place.members[at]] = pair
    found = {linear.path: linear.adapted(pairs, dtype) for linear in linears}
    return replace_linears(model, {path: new for path, new in found.items() if new is not None})


def peft_tensor_names(folder: Path) -> list[str]:
    """The names of the tensors in a folder of PEFT's, by which a model may tell how they were written.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: there is no `adapter_model.safetensors`.
        ValueError: it is cut short or no safetensors file.
    """
    with _opened(_tensors_file(folder)) as file:
        return list(file.keys())


@dataclass(frozen=True)
class _Linear:
    """One linear of the model, for all the layers it stands for.

    Attributes:
        path: its path.
        module: the module, adapted or not.
        stack: sizes of the axes that it owes to stacks.
        narrow: inputs, all axes together.
        wide: outputs, all axes together.
        members: what each of its matrices is called, by the index in the stacks.
    """

    path: str
    module: Any
    stack: tuple[int, ...]
    narrow: int
    wide: int
    members: Mapping[Index, PeftParameter] = field(repr=False)

    def pairs(self) -> dict[PeftParameter, Pair]:
        """The adapters as they are; none where the linear has none."""
        if not isinstance(self.module, LoraLinear):
            return {}
        a, b = self.module.a, self.module.b
        wrapped = self.module.wrapped
        if isinstance(a, NamedArray) and isinstance(b, NamedArray) and isinstance(wrapped, hnn.Linear):
            Stack, (In, Out) = stack_axes(wrapped), linear_axes(wrapped)
            a = a.rearrange((*Stack, *In, RANK_AXIS)).array
            b = b.rearrange((*Stack, RANK_AXIS, *Out)).array
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        rank = self._rank()
        a = np.swapaxes(a.reshape(*self.stack, self.narrow, rank), -1, -2)
        b = np.swapaxes(b.reshape(*self.stack, rank, self.wide), -1, -2)
        scale = self.module.scale
        return {member: Pair(a[index], b[index], scale) for index, member in self.members.items()}

    def adapted(self, pairs: Mapping[PeftParameter, Pair], dtype: DTypeLike) -> LoraLinear | None:
        """The linear with those of `pairs` that are its own, None where none is."""
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
            if pair.scale != scale:
                b[index] *= pair.scale / scale
        wrapped = self.module.wrapped if isinstance(self.module, LoraLinear) else self.module
        if not isinstance(wrapped, hnn.Linear):
            return LoraLinear(wrapped, jnp.asarray(a, dtype), jnp.asarray(b, dtype), scale)
        Stack, (In, Out), Rank = stack_axes(wrapped), linear_axes(wrapped), Axis(RANK_AXIS, rank)
        return LoraLinear(
            wrapped, _named(a, (*Stack, *In, Rank), dtype), _named(b, (*Stack, Rank, *Out), dtype), scale
        )

    def _rank(self) -> int:
        a = self.module.a
        return a.resolve_axis(RANK_AXIS).size if isinstance(a, NamedArray) else a.shape[-1]


def _named(array: np.ndarray, axes: tuple[Axis, ...], dtype: DTypeLike) -> NamedArray:
    return NamedArray(jnp.asarray(array.reshape([axis.size for axis in axes]), dtype), axes)


def _linears(model: Any, names: PeftNames) -> list[_Linear]:
    found = []
    for path, module in lora_linears(model).items():
        wrapped = module.wrapped if isinstance(module, LoraLinear) else module
        if isinstance(wrapped, hnn.Linear):
            stack = tuple(axis.size for axis in stack_axes(wrapped))
            narrow, wide = (int(np.prod([axis.size for axis in axes])) for axes in linear_axes(wrapped))
        else:
            *sizes, wide, narrow = wrapped.weight.shape
            stack = tuple(sizes)
        members = {}
        for index in np.ndindex(stack):
            name = names(path, index)
            members[index] = PeftParameter(name, "") if isinstance(name, str) else name
        found.append(_Linear(path, module, stack, narrow, wide, members))
    return found


def _tensors_file(folder: Path) -> Path:
    path = folder / TENSORS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"No PEFT adapter in {folder}: {TENSORS_FILE} is missing.")
    return path


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, "numpy") as file:
            yield file
    except (safetensors.error, OSError) as error:
        raise ValueError(
            f"{path} can't be read as a safetensors file ({error}). It may be cut short; fetch or save "
            f"it again."
        ) from error


def _part_ranks(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Sequence[int]]:
    text = metadata.get(_PART_RANKS, "{}")
    try:
        found = json.loads(text)
        fits = all(isinstance(rank, int) and rank >= 0 for ranks in found.values() for rank in ranks)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{_PART_RANKS} in the header of {path} can't be read: {text!r}. Save it again."
        ) from error
    if not fits:
        raise ValueError(f"{_PART_RANKS} in the header of {path} are no ranks: {text!r}. Save it again.")
    return found


def _plain(key: str) -> str:
    return key if key.isprintable() else repr(key)


def _some(place: Place) -> PeftParameter:
    return next(iter(place.members.values()))


def _adapted(places: Mapping[str, Place], settings: PeftSettings, keys: set[str]) -> dict[str, PeftParameter]:
    """The targets that have adapters: those that the config names, and those that have tensors."""
    by_module: dict[str, dict[str, PeftParameter]] = {}
    for target, place in places.items():
        by_module.setdefault(_some(place).module, {})[target] = _some(place)
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
    places: Mapping[str, Place],
    settings: PeftSettings,
    linears: Sequence[_Linear],
) -> list[str]:
    sizes = {member: (one.narrow, one.wide) for one in linears for member in one.members.values()}
    expected: dict[str, tuple[int, ...]] = {}
    for target, (a, b) in keys.items():
        place, (narrow, wide) = places[target], sizes[_some(places[target])]
        rows = settings.rank(_some(place)) * place.size
        expected[a], expected[b] = (rows, narrow), (wide * place.parts, rows)
    problems = [f"missing: {key} {shape}" for key, shape in expected.items() if key not in shapes]
    problems += [f"unknown: {_plain(key)} {shape}" for key, shape in shapes.items() if key not in expected]
    problems += [
        f"misshapen: {key} is {shapes[key]}, expected {shape}"
        for key, shape in expected.items()
        if key in shapes and shapes[key] != shape
    ]
    for linear in linears:
        without = [member.target for member in linear.members.values() if member.target not in keys]
        if isinstance(linear.module, LoraLinear) and len(without) == len(linear.members):
            problems.append(f"missing: {linear.path} has an adapter, and the file none for {without[0]}")
    return problems


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "PEFT's files are read and written with safetensors: pip install 'stacked_remat[weights]'."
        ) from error
    return _Safetensors(safetensors.safe_open, safetensors.numpy.save_file, safetensors.SafetensorError)


@dataclass(frozen=True)
class _Safetensors:
    safe_open: Callable[..., Any]
    save_file: Callable[..., None]
    error: type[Exception]


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
