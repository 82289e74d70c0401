"""What compile-only reports say of the stacks that the calculator of the documentation
predicts.

Each case is an input of `estimate` in `docs/javascripts/calculator.js` and what a row
of `benchmarks/results` says of the same program. The page shows both; a test compares
them.
"""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.pattern import KINDS
from benchmarks.record import RESULTS

_POLICIES: dict[str, dict[str, Any]] = {
    "False": {"save_block_internals": True},
    "True": {},
    "nested": {"nested": True},
    "nested=7": {"nested": 7},
    "max_carries=6": {"max_carries": 6},
    "offload": {"offload": True},
    "nested + offload": {"nested": True, "offload": True},
    "nested, offload": {"nested": True, "offload": True},
}
_DECODERS = {
    "qwen3_context": (48, 2048),
    "gpt_oss_20b_65k_lora_context": (24, 2880),
    "qwen3_next_blockwise": (48, 2048),
}
"""Layers and width of the models whose training steps are reported."""


def cases() -> list[dict[str, Any]]:
    """Every case, with `source`, `name`, `input` and `reported`, in bytes and FLOPs."""
    return [*_stacks(), *_patterns(), *_updates(), *_steps()]


def _rows(pattern: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every row of the files that match, after the file and the inputs that all cases
    have.
    """
    for path in sorted(RESULTS.rglob(pattern)):
        found = json.loads(path.read_text(encoding="utf-8"))
        # Each policy's loops gather at other times, which a report of one does not say.
        if found.get("devices", 1) > 1:
            continue
        for row in found["rows"]:
            if "refused" not in row:
                sizes = {
                    key: row[key] for key in ("layers", "tokens", "width") if key in row
                }
                yield (
                    str(path.relative_to(RESULTS)),
                    {"target": found["target"], **sizes},
                    row,
                )


def _case(
    source: str, name: str, row: dict[str, Any], policy: str, given: dict[str, Any]
) -> dict[str, Any]:
    reported = {
        key: row[key] for key in ("temporaries", "total", "host", "matmul_flops")
    }
    given = {"dtype": "bfloat16", "policy": _POLICIES[policy], **given}
    return {"source": source, "name": name, "input": given, "reported": reported}


def _stacks() -> Iterator[dict[str, Any]]:
    """A residual MLP under each policy."""
    for source, given, row in _rows("stack_memory_*.json"):
        library, _, name = row["name"].partition(" ")
        policy, _, frozen = name.partition(", frozen")
        if library == "stacked_remat" and policy in _POLICIES:
            given |= {
                "inner": [row["inner"]],
                "update": "frozen" if frozen else "gradient",
            }
            yield _case(
                source,
                f"{row['layers']} layers, inner {row['inner']}, {name}",
                row,
                policy,
                given,
            )


def _patterns() -> Iterator[dict[str, Any]]:
    """Residual MLPs of several widths in one stack."""
    known = {kinds.name: kinds for kinds in KINDS}
    for source, given, row in _rows("pattern_memory_*.json"):
        form, _, name = row["name"].partition(", ")
        of, _, policy = name.rpartition(", ")
        if form == "StackedPattern":
            kinds = known[of]
            given["inner"] = [
                row["inner"] // kinds.shares[kind] for kind in kinds.cycle
            ]
            given["layers"] = len(kinds.pattern(row["layers"]))
            yield _case(source, name, row, policy, given)


def _updates() -> Iterator[dict[str, Any]]:
    """A step of SGD within the backward pass, at several depths."""
    for source, given, row in _rows("streaming_[hv]*.json"):
        if row["block"] == "mlp" and row["name"] == "nested, resident":
            given |= {
                "tokens": 65_536,
                "width": 2_048,
                "inner": [16_384],
                "update": "fused",
            }
            yield _case(
                source, f"{row['layers']} layers, update, nested", row, "nested", given
            )


def _steps() -> Iterator[dict[str, Any]]:
    """Training steps of decoders; what a layer holds is taken from the row of `True`
    with as many tokens, in as many tiles.
    """
    for model, (layers, width) in _DECODERS.items():
        rows = [*_rows(f"{model}_*.json")]
        known: dict[tuple[str, int, int], dict[str, Any]] = {}
        for source, _, row in rows:
            if row["policy"] == "True":
                known[source, row["tokens"], row.get("tiles", 1)] = {
                    "temporaries": row["temporaries"] - row.get("host_temporaries", 0),
                    "constant": row["arguments"] + row["outputs"],
                }
        for source, given, row in rows:
            tiles = row.get("tiles", 1)
            program = source, row["tokens"], tiles
            # The row of `True` does not tell what `False` keeps of a layer
            if row["policy"] in ("True", "False") or program not in known:
                continue
            given |= {"layers": layers, "width": width, "reported": known[program]}
            in_tiles = f" in {tiles} tiles" if tiles > 1 else ""
            yield _case(
                source,
                f"{row['tokens']} tokens{in_tiles}, {row['policy']}",
                row,
                row["policy"],
                given,
            )
