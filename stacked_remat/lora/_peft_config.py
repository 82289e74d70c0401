"""PEFT's `adapter_config.json`: which targets have adapters, and their ranks and
scales.
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
        entries = {
            name: value
            for name, value in read_json_fields(path).items()
            if value is not None
        }
        refused = [
            f"{name} = {reprlib.repr(value)}"
            for name, value in entries.items()
            if (value and name in _UNSUPPORTED)
            or value not in _SUPPORTED.get(name, (value,))
            or not isinstance(value, _READ.get(name, object))
        ]
        if refused:
            raise ValueError(
                f"{path} has settings that are not supported: {', '.join(refused)}."
            )
        unknown = [
            name for name, value in entries.items() if value and name not in _KNOWN
        ]
        if unknown:
            warnings.warn(
                f"{path} has unknown fields, which are not used:"
                f" {', '.join(map(reprlib.repr, unknown))}. Check that they do not"
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
            return _ends_with(
                member.target, self.entries.get("target_parameters") or []
            )
        modules = self.entries.get("target_modules") or []
        if isinstance(modules, str):
            return (
                modules.lower() != "all-linear"
                and re.fullmatch(modules, member.target) is not None
            )
        return _ends_with(member.target, modules)

    def rank(self, member: PeftParameter) -> int:
        """Rank of one matrix of the target."""
        return self._pattern("rank_pattern", member, self.entries.get("r", 8))

    def scale(self, member: PeftParameter) -> float:
        """Factor of the adapters' outputs."""
        alpha = self._pattern(
            "alpha_pattern", member, self.entries.get("lora_alpha", 8)
        )
        rank = self.rank(member)
        return alpha / (math.sqrt(rank) if self.entries.get("use_rslora") else rank)

    def _pattern(self, which: str, member: PeftParameter, default: Any) -> Any:
        names = (
            (member.target, member.module)
            if member.parameter == "weight"
            else (member.target,)
        )
        for pattern, value in (self.entries.get(which) or {}).items():
            if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names):
                return value
        return default


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
    ranks = {
        name: tensor.a.shape[0] // targets[name].parameter.size
        for name, tensor in tensors.items()
    }
    kinds = {name: (rank, tensors[name].scale * rank) for name, rank in ranks.items()}
    base = base_model or ""
    name, _, revision = (
        (base, "", "") if Path(base).expanduser().is_dir() else base.partition("@")
    )
    ((rank, alpha), _), *_ = collections.Counter(kinds.values()).most_common()
    others = [name for name in targets if name not in tensors]
    parameters = [name for name in tensors if targets[name].parameter.parameter]
    modules = [name for name in tensors if name not in parameters]
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
    for kind in sorted(set(kinds.values()) - {(rank, alpha)}):
        alike = [target for target, own in kinds.items() if own == kind]
        unlike = [*(target for target, own in kinds.items() if own != kind), *others]
        for suffix in shortest_suffixes(alike, unlike, at_least=2):
            entries["rank_pattern"][re.escape(suffix)] = kind[0]
            entries["alpha_pattern"][re.escape(suffix)] = _integral(kind[1])
    return entries


def shortest_suffixes(
    names: Iterable[str], others: Sequence[str], at_least: int = 1
) -> list[str]:
    """The shortest suffix of components of every name that is no suffix of `others`;
    sorted, unique.
    """

    def suffixes(name: str) -> list[str]:
        components = name.split(".")
        return [
            ".".join(components[-length:]) for length in range(1, len(components) + 1)
        ]

    taken = {suffix for other in others for suffix in suffixes(other)}
    first = (
        next((one for one in suffixes(name)[at_least - 1 :] if one not in taken), name)
        for name in names
    )
    return sorted({*first})


def _ends_with(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _integral(alpha: float) -> float | int:
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha
