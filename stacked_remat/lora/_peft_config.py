"""PEFT's `adapter_config.json`: which targets have adapters, of what rank and scale."""

import collections
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._peft_layout import Assembled, PeftParameter

CONFIG_FILE = "adapter_config.json"

# What changes the arithmetic in a way that LoraLinear has not, with the values that switch it off.
_UNSUPPORTED = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "alora_invocation_tokens": (None, []),
}
# With one of these, which layers have adapters is left to the tensors.
_NARROWING = ("layers_to_transform", "exclude_modules")


@dataclass(frozen=True)
class PeftSettings:
    """What an `adapter_config.json` says of the adapters.

    Attributes:
        entries: the file.
    """

    entries: Mapping[str, Any]

    @staticmethod
    def read(folder: Path) -> "PeftSettings":
        """Reads the file in `folder`.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it describes something else than plain LoRA.
        """
        path = folder / CONFIG_FILE
        if not path.exists():
            raise FileNotFoundError(f"No PEFT adapter in {folder}: {CONFIG_FILE} is missing.")
        entries = json.loads(path.read_text(encoding="utf-8"))
        refused = [
            f"{name} = {entries[name]!r}"
            for name, neutral in {"peft_type": ("LORA",), **_UNSUPPORTED}.items()
            if name in entries and entries[name] not in neutral
        ]
        if refused:
            raise ValueError(f"{path} asks for what only PEFT can do: {', '.join(refused)}.")
        return PeftSettings(entries)

    def targets(self, member: PeftParameter) -> bool:
        """Whether the config names the target; never, where it leaves the layers to the tensors."""
        if any(self.entries.get(name) for name in _NARROWING):
            return False
        if member.parameter:
            return _ends_with(member.target, self.entries.get("target_parameters") or [])
        modules = self.entries.get("target_modules") or []
        if isinstance(modules, str):
            return modules.lower() != "all-linear" and re.fullmatch(modules, member.target) is not None
        return _ends_with(member.target, modules)

    def rank(self, member: PeftParameter) -> int:
        """Rank of one matrix of the target."""
        return self._pattern("rank_pattern", member, self.entries.get("r", 8))

    def scale(self, member: PeftParameter) -> float:
        """Factor of the adapters' outputs."""
        alpha, rank = (
            self._pattern("alpha_pattern", member, self.entries.get("lora_alpha", 8)),
            self.rank(member),
        )
        return alpha / (math.sqrt(rank) if self.entries.get("use_rslora") else rank)

    def _pattern(self, which: str, member: PeftParameter, default: Any) -> Any:
        # A matrix by itself may have been that of a module.
        names = (member.target, member.module) if member.parameter == "weight" else (member.target,)
        for pattern, value in (self.entries.get(which) or {}).items():
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                return value
        return default


def describe(
    tensors: Mapping[str, Assembled],
    members: Mapping[str, PeftParameter],
    others: Sequence[str],
    base_model: str | None,
) -> dict[str, Any]:
    """The entries of the file for adapters of these targets.

    Args:
        tensors: what is written, by target.
        members: one linear of each target.
        others: the targets that have no adapter, so that no name is shortened to one that fits them too.
        base_model: what the adapters belong to.
    """
    kinds = {target: (tensor.rank, tensor.scale * tensor.rank) for target, tensor in tensors.items()}
    ((rank, alpha), _), *_ = collections.Counter(kinds.values()).most_common()
    modules = [target for target, member in members.items() if not member.parameter]
    parameters = [target for target, member in members.items() if member.parameter]
    entries: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "r": rank,
        "lora_alpha": _integral(alpha),
        "target_modules": shortest_suffixes(modules, [*others, *parameters]),
        # With its module: other modules, unknown here, may have a parameter of that name.
        "target_parameters": shortest_suffixes(parameters, [*others, *modules], at_least=2) or None,
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


def shortest_suffixes(names: Iterable[str], others: Sequence[str], at_least: int = 1) -> list[str]:
    """For every name the fewest last components that end none of the others; each suffix once, sorted."""
    taken = {suffix for other in others for suffix in _suffixes(other)}
    chosen = set()
    for name in names:
        suffixes = _suffixes(name)[at_least - 1 :]
        chosen.add(next((suffix for suffix in suffixes if suffix not in taken), name))
    return sorted(chosen)


def _suffixes(name: str) -> list[str]:
    components = name.split(".")
    return [".".join(components[-length:]) for length in range(1, len(components) + 1)]


def _ends_with(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _integral(alpha: float) -> float | int:
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha
