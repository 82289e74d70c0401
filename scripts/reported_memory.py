"""What compile-only reports say of the stacks that the calculator of the documentation predicts.

Each case is an input of `estimate` in `docs/javascripts/calculator.js` and what a row of
`benchmarks/results` says of the same program. The page shows both; a test compares them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"

_POLICIES: dict[str, dict[str, Any]] = {
    "False": {"save_block_internals": True},
    "True": {},
    "nested": {"nested": True},
    "nested=7": {"nested": 7},
    "max_carries=6": {"max_carries": 6},
    "nested, 8 keep carries": {"nested": True, "first_layers": 8, "first_carries": True},
    "offload": {"offload": True},
    "nested + offload": {"nested": True, "offload": True},
    "nested, offload": {"nested": True, "offload": True},
}
_DECODERS = {"qwen3_context": (48, 2048), "gpt_oss_20b_65k_lora_context": (24, 2880)}
"""Layers and width of the models whose training steps are reported."""
_KINDS = {
    "one kind": (1,),
    "two of equal width, 1:1": (1, 1),
    "two, the other an eighth as wide, 1:1": (1, 8),
    "two, five narrow to a wide one, with remainder": (8, 8, 8, 8, 8, 1),
    "four of equal width": (1, 1, 1, 1),
    "four, three of them an eighth as wide": (1, 8, 8, 8),
}
"""What part of the widest inner width each layer of a cycle has, in `benchmarks/pattern.py`."""


def cases() -> list[dict[str, Any]]:
    """Every case, with `source`, `name`, `input` and `reported`, in bytes and FLOPs."""
    return [*_stacks(), *_patterns(), *_updates(), *_steps()]


def _rows(pattern: str) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    for path in sorted(RESULTS.rglob(pattern)):
        found = json.loads(path.read_text(encoding="utf-8"))
        yield (
            str(path.relative_to(RESULTS)),
            found["target"],
            [row for row in found["rows"] if "refused" not in row],
        )


def _case(source: str, name: str, row: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    reported = {key: row[key] for key in ("temporaries", "total", "host", "matmul_flops")}
    return {"source": source, "name": name, "input": {"dtype": "bfloat16", **given}, "reported": reported}


def _sizes(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("layers", "tokens", "width")}


def _stacks() -> Iterator[dict[str, Any]]:
    """A residual MLP under each policy."""
    for source, target, rows in _rows("stack_memory_*.json"):
        for row in rows:
            library, _, name = row["name"].partition(" ")
            policy, _, frozen = name.partition(", frozen")
            if library == "stacked_remat" and policy in _POLICIES:
                given = {"target": target, "inner": [row["inner"]], "policy": _POLICIES[policy]}
                given["update"] = "frozen" if frozen else "gradient"
                label = f"{row['layers']} layers, inner {row['inner']}, {name}"
                yield _case(source, label, row, {**_sizes(row), **given})


def _patterns() -> Iterator[dict[str, Any]]:
    """Residual MLPs of several widths in one stack."""
    for source, target, rows in _rows("pattern_memory_*.json"):
        for row in rows:
            form, _, name = row["name"].partition(", ")
            kinds, _, policy = name.rpartition(", ")
            if form != "StackedPattern":
                continue
            inner = [row["inner"] // share for share in _KINDS[kinds]]
            given = {**_sizes(row), "target": target, "inner": inner, "policy": _POLICIES[policy]}
            given["layers"] -= 2 if "remainder" in kinds else 0
            yield _case(source, f"{kinds}, {policy}", row, given)


def _updates() -> Iterator[dict[str, Any]]:
    """A step of SGD within the backward pass, at several depths."""
    for source, target, rows in _rows("streaming_[hv]*.json"):
        for row in rows:
            if row["block"] == "mlp" and row["name"] == "nested, resident":
                sizes = {"layers": row["layers"], "tokens": 65_536, "width": 2_048, "inner": [16_384]}
                given = {**sizes, "target": target, "policy": _POLICIES["nested"], "update": "fused"}
                yield _case(source, f"{row['layers']} layers, update, nested", row, given)


def _steps() -> Iterator[dict[str, Any]]:
    """Training steps of decoders; what a layer holds is taken from the row of `True` with as many tokens."""
    for model, (layers, width) in _DECODERS.items():
        for source, target, rows in _rows(f"{model}_*.json"):
            known = {row["tokens"]: row for row in rows if row["policy"] == "True"}
            for row in rows:
                if row["policy"] == "True" or row["tokens"] not in known:
                    continue
                of = known[row["tokens"]]
                measured = {
                    "temporaries": of["temporaries"] - of.get("host_temporaries", 0),
                    "constant": of["arguments"] + of["outputs"],
                }
                given = {"layers": layers, "tokens": row["tokens"], "width": width, "target": target}
                given |= {"policy": _POLICIES[row["policy"]], "reported": measured}
                yield _case(source, f"{row['tokens']} tokens, {row['policy']}", row, given)
