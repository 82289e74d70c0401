"""PEFT's `adapter_config.json`: which targets have adapters, and their ranks and
scales.

PEFT names targets by suffixes of dotted names or by one regular expression, has one
rank and one alpha, and lists others by pattern. A field that would change what adapters
compute, and that `LoraLinear` does not have, is refused; one that is not known here
gives a warning. What is written uses the shortest suffixes that tell targets apart.
"""

import collections
import math
import re
import reprlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._files import read_json_fields
from ._peft_layout import Pair, PeftParameter, Target

CONFIG_FILE = "adapter_config.json"

# Fields that change the arithmetic in ways that LoraLinear does not support, unless
# they are off.
_UNSUPPORTED = (
    "use_dora use_qalora use_bdlora lora_bias fan_in_fan_out modules_to_save"
    " trainable_token_indices layer_replication arrow_config kasa_config"
    " monteclora_config alora_invocation_tokens".split()
)
_SUPPORTED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (
        True,
        False,
        "gaussian",
        "eva",
        "orthogonal",
    ),  # others change base weights
}
# With one of these, the tensors decide which layers have adapters.
_NARROWING = ("layers_to_transform", "exclude_modules")
_READ = {
    "r": int,
    "lora_alpha": (int, float),
    "rank_pattern": dict,
    "alpha_pattern": dict,
}
_READ |= {"use_rslora": bool, "target_modules": (str, list), "target_parameters": list}
# Names, and how the adapters were trained: no effect on the arithmetic in evaluation.
_WITHOUT_EFFECT = (
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config"
    " inference_mode layers_pattern loftq_config lora_dropout lora_ga_config"
    " megatron_config megatron_core peft_version qalora_group_size revision"
    " runtime_config task_type velora_config".split()
)
_KNOWN = {*_UNSUPPORTED, *_SUPPORTED, *_NARROWING, *_READ, *_WITHOUT_EFFECT}


@dataclass(frozen=True)
class PeftSettings:
    """The fields of an `adapter_config.json`."""

    entries: Mapping[str, Any]

    @staticmethod
    def read(folder: Path) -> "PeftSettings":
        """Read the file in `folder`; an unknown field that is not off gives a
        warning.
        """
        path = adapter_file(folder, CONFIG_FILE)
        entries: dict[str, Any] = {}
        refused: list[str] = []
        unknown: list[str] = []
        for name, value in read_json_fields(path).items():
            # PEFT writes every field, and null for those that are not set.
            if value is None:
                continue
            entries[name] = value
            if not _is_supported(name, value):
                refused.append(f"{name} = {reprlib.repr(value)}")
            if value and name not in _KNOWN:
                unknown.append(reprlib.repr(name))
        if refused:
            raise ValueError(
                f"{path} has settings that are not supported: {', '.join(refused)}."
            )
        if unknown:
            warnings.warn(
                f"{path} has unknown fields, which are not used:"
                f" {', '.join(unknown)}. Check that they do not"
                " change what the adapters compute.",
                stacklevel=3,
            )
        return PeftSettings(entries)

    def targets(self, member: PeftParameter) -> bool:
        """Whether the config names the target; False if it leaves the layers to the
        tensors.
        """
        if any(self.entries.get(name) for name in _NARROWING):
            return False
        if member.parameter:
            parameters = self.entries.get("target_parameters") or []
            return _ends_with(member.target, parameters)
        modules = self.entries.get("target_modules") or []
        if not isinstance(modules, str):
            return _ends_with(member.target, modules)
        # Which linears that is depends on PEFT's class around the model.
        if modules.lower() == "all-linear":
            return False
        return re.fullmatch(modules, member.target) is not None

    def rank(self, member: PeftParameter) -> int:
        """Rank of one matrix of the target."""
        return self._pattern("rank_pattern", member, self.entries.get("r", 8))

    def scale(self, member: PeftParameter) -> float:
        """Factor of the adapters' outputs."""
        alpha = self._pattern(
            "alpha_pattern", member, self.entries.get("lora_alpha", 8)
        )
        rank = self.rank(member)
        # "Rank-stabilized" LoRA (Kalajdzievski 2023)
        if self.entries.get("use_rslora"):
            return alpha / math.sqrt(rank)
        return alpha / rank

    def _pattern(self, which: str, member: PeftParameter, default: Any) -> Any:
        """The value of the first pattern that matches the target."""
        names = [member.target]
        # PEFT takes the name of the module for a parameter that is its weight.
        if member.parameter == "weight":
            names.append(member.module)
        for pattern, value in (self.entries.get(which) or {}).items():
            expression = re.compile(rf"(.*\.)?({pattern})")
            if any(map(expression.fullmatch, names)):
                return value
        return default


def _is_supported(name: str, value: Any) -> bool:
    """Whether a field has a value with which `LoraLinear` computes the same."""
    if name in _UNSUPPORTED and value:
        return False
    if name in _SUPPORTED and value not in _SUPPORTED[name]:
        return False
    return isinstance(value, _READ.get(name, object))


def adapter_file(folder: Path, name: str) -> Path:
    """The path of one of the two files of an adapter, which must exist."""
    if not (folder / name).is_file():
        raise FileNotFoundError(f"No PEFT adapter in {folder}: {name} is missing.")
    return folder / name


def describe(
    tensors: Mapping[str, Pair],
    targets: Mapping[str, Target],
    base_model: str | None,
    task_type: str | None,
) -> dict[str, Any]:
    """The fields of the file for adapters of some of the targets."""
    kinds: dict[str, tuple[int, float]] = {}  # the rank and alpha of each target
    parameters: list[str] = []
    modules: list[str] = []
    for target, tensor in tensors.items():
        parameter = targets[target].parameter
        # The tensors of a parameter have the ranks of all its matrices.
        rank = tensor.a.shape[0] // parameter.size
        kinds[target] = (rank, tensor.scale * rank)
        (parameters if parameter.parameter else modules).append(target)
    others = [target for target in targets if target not in tensors]
    # The most common are the defaults, so that few patterns are needed.
    most_common, _ = collections.Counter(kinds.values()).most_common(1)[0]
    rank, alpha = most_common
    name = base_model or ""
    revision = ""
    if not Path(name).expanduser().is_dir():
        name, _, revision = name.partition("@")
    entries: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": name or None,
        "revision": revision or None,
        "inference_mode": True,
        "bias": "none",
        **dict.fromkeys(("fan_in_fan_out", "use_rslora", "use_dora"), False),
        "lora_dropout": 0.0,
        "r": rank,
        "lora_alpha": _integral(alpha),
        "target_modules": shortest_suffixes(modules, [*others, *parameters]),
        # With the module: others, unknown here, may have a parameter of that name.
        "target_parameters": (
            shortest_suffixes(parameters, [*others, *modules], at_least=2) or None
        ),
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    for kind in sorted(set(kinds.values()) - {most_common}):
        alike: list[str] = []
        unlike = [*others]
        for target, own in kinds.items():
            (alike if own == kind else unlike).append(target)
        rank, alpha = kind
        for suffix in shortest_suffixes(alike, unlike, at_least=2):
            entries["rank_pattern"][re.escape(suffix)] = rank
            entries["alpha_pattern"][re.escape(suffix)] = _integral(alpha)
    return entries


def shortest_suffixes(
    names: Iterable[str], others: Sequence[str], at_least: int = 1
) -> list[str]:
    """The shortest suffix of components of every name that is no suffix of `others`;
    sorted, unique.
    """
    taken: set[str] = set()
    for other in others:
        taken.update(_suffixes(other))
    found = set()
    for name in names:
        free = [
            suffix for suffix in _suffixes(name)[at_least - 1 :] if suffix not in taken
        ]
        found.add(free[0] if free else name)
    return sorted(found)


def _suffixes(name: str) -> list[str]:
    """`a.b.c` as `c`, `b.c` and `a.b.c`."""
    components = name.split(".")
    lengths = range(1, len(components) + 1)
    return [".".join(components[-length:]) for length in lengths]


def _ends_with(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _integral(alpha: float) -> float | int:
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha
