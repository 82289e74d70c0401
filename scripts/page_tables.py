"""The tables that pages mark, and the figures in their sentences, which results must have."""

import re
from collections.abc import Iterator

from scripts.result_tables import Table, values, whole_table

MARKER = re.compile(r"^<!-- (table|figures): (\S+) -->$", re.MULTILINE)
"""Where a page wants a table: a file of `benchmarks/results`, or a name below.

`figures` shows nothing and says where figures of sentences come from.
"""

_STEP = ("policy", "arguments", "temporaries", "total", "host")
_CONTEXT = ("tokens", "policy", "temporaries", "total", "host")
_TO_TRUE = "matmul_flops / policy=True"
_LAYERS_ON_HOST = {"rows": ("name",), "columns": ("layers",), "cells": ("total",), "only": {"block": "mlp"}}

TABLES = {
    "checkpoint": Table(
        tuple(f"checkpoint_chain_{target}.json" for target in ("h200", "v5p", "local")),
        rows=("name",),
        columns=("target",),
        cells=("carries", "products"),
    ),
    "devices": Table(("qwen3_context_v5p_8.json",), rows=(*_STEP, _TO_TRUE)),
    "devices-steps": Table(
        tuple(f"qwen3_{name}_8.json" for name in ("30b_a3b_65k_fsdp_h100", "235b_a22b_131k_fsdp_lora_h200"))
        + ("qwen3_30b_a3b_65k_fsdp_v5p_16.json",),
        rows=("target", "weights divided by", "layers", "tokens", "update", *_STEP, "sent"),
    ),
    "devices-weights": Table(("qwen3_context_h200_8.json",), rows=_STEP),
    "devices-experts": Table(("qwen3_context_h200_8_experts.json",), rows=_STEP),
    "devices-positions": Table(("qwen3_context_h200_8_positions.json",), rows=_STEP),
    "fused-updates": Table(
        tuple(
            f"{name}_{target}.json" for name in ("stack_memory", "streaming") for target in ("h200", "v5p")
        ),
        rows=("name",),
        columns=("target",),
        cells=("total",),
        only={"name": "stacked_remat nested|nested, resident", "layers": "48", "inner": "16384|None"},
    ),
    "ghost-flops": Table(("ghost_flops.json",), rows=("layers", "trained", "scored / plain")),
    "ghost-memory": Table(
        ("ghost_memory_h200.json",),
        rows=("layers", "trained", "examples", "tokens", "plain: temporaries", "scored: temporaries"),
    ),
    "ghost-influence": Table(("influence.json",), rows=("task", "rate", "method", "score_0.5", "score_0.9")),
    "ghost-planted": Table(
        ("planted_examples.json",),
        rows=(
            "scored",
            "wrong",
            "auc",
            "wrong_among_as_many_lowest",
            "auc_of_50_steps",
            "auc_of_later_steps",
        ),
    ),
    "long-context": Table(("qwen3_context_h200.json",), rows=(*_CONTEXT, _TO_TRUE)),
    "long-context-attention": Table(
        ("qwen3_step_nvidia_h200.json",),
        rows=("case", "kernel"),
        columns=("tokens",),
        cells=("milliseconds",),
        only={"job": "attention", "milliseconds": r"\d.*"},
    ),
    "long-context-cpu": Table(
        ("long_context_cpu.json",), rows=("policy", "tokens", "seconds", "peak_resident_bytes")
    ),
    "long-context-experts": Table(
        ("qwen3_experts_h200.json", "qwen3_experts_v5p.json"),
        rows=("target", "backend", "temporaries", "total"),
    ),
    "long-context-gpt-oss": Table(("gpt_oss_20b_65k_lora_context_h200.json",), rows=_CONTEXT),
    "long-context-longest": Table(
        ("qwen3_longest_h200.json",), rows=("budget", "policy", "tokens", "total", "host")
    ),
    "long-context-presets": Table(
        ("qwen3_presets_h200.json",), rows=("backend", "policy", "temporaries", "total", "host", _TO_TRUE)
    ),
    "long-context-steps": Table(
        ("qwen3_step_nvidia_h200.json",),
        rows=("num_layers", "policy", "backends: experts", "seconds"),
        only={"job": "step", "seconds": r"\d.*"},
    ),
    "long-context-kernels": Table(
        ("qwen3_step_nvidia_h200.json",),
        rows=("kind",),
        columns=("policy",),
        cells=("profiled_seconds",),
        only={"job": "step", "kind": ".*[a-z]"},
    ),
    "long-loops-time": Table(
        ("long_loops_cpu.json",), rows=("name",), columns=("case",), cells=("milliseconds",)
    ),
    "long-loops-memory": Table(
        ("long_loops_cpu.json",), rows=("name",), columns=("case",), cells=("temporary_kib",)
    ),
    "nested-memory": Table(
        ("stack_memory_h200.json", "stack_memory_v5p.json"),
        rows=("name", "matmul_flops / name=stacked_remat True"),
        columns=("target", "inner"),
        cells=("temporaries",),
        only={"name": r"flax nnx.scan \+ nnx.remat|(?!.*(nnx|tiles|frozen|Hessian)).*"},
    ),
    "nested-hessian": Table(
        ("stack_memory_h200.json",),
        rows=("name",),
        columns=("inner",),
        cells=("temporaries",),
        only={"name": ".*, Hessian product|stacked_remat nested"},
    ),
    "nnx": Table(
        ("stack_memory_h200.json",),
        rows=("name", "matmul_flops / name=flax nnx.scan"),
        columns=("inner",),
        cells=("temporaries",),
        only={"name": r"flax.*|stacked_remat\.nnx.*"},
    ),
    "patterns": Table(
        ("pattern_memory_h200.json", "pattern_memory_v5p.json"),
        rows=("name", "matmul_flops"),
        columns=("target",),
        cells=("temporaries",),
    ),
    "streaming-h200": Table(("streaming_h200.json",), **_LAYERS_ON_HOST),
    "streaming-v5p": Table(("streaming_v5p.json",), **_LAYERS_ON_HOST),
    "streaming-experts": Table(
        ("streaming_h200.json", "streaming_v5p.json"),
        rows=("name",),
        columns=("target", "program"),
        cells=("total",),
        only={"block": "experts"},
    ),
    "streaming-time": Table(
        ("streaming_time_cpu.json",),
        rows=("kind",),
        columns=("program",),
        cells=("to_resident",),
        only={"program": "gradient|update|sliced_by_index"},
    ),
    "streaming-steps": Table(
        ("streaming_steps_h200.json", "streaming_steps_v5p.json"),
        rows=("config", "tokens", "target", "total", "host", "transfers"),
    ),
    "tiles": Table(
        ("stack_memory_h200.json",),
        rows=("name", "temporaries"),
        only={"name": r"stacked_remat (True|nested|offload)(, \d+ tiles)?", "inner": "16384"},
    ),
    "tiles-decoder": Table(
        ("qwen3_tiles_h200.json",),
        rows=("policy",),
        columns=("tiles",),
        cells=("temporaries", "matmul_flops / policy=True, tiles=1"),
    ),
}

_NOT_SENTENCES = re.compile(r"^```.*?^```$|^    .*?$|`[^`]*`|<[^>]*>|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
_VERSION = re.compile(r"(?:Python|JAX|jax|jaxlib) \d[\d.]*")
_FIGURE = re.compile(
    r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)(?![\w.,/]*\d)"
    r"(?:[ -]?(GiB|MiB|TiB|TFLOP|ms|s|seconds|minutes|%)(?![\w/]))?"
)
_SCALE = {"MiB": 1 / 1024, "TiB": 1024, "ms": 1e-3, "minutes": 60, "%": 1e-2}


def with_tables(page: str) -> str:
    """The page with its tables.

    Raises:
        ValueError: there is no such file or table, or a figure (a number with decimals or a unit, other than
            in code) is not in the results that the page names.
    """
    known = _known(page)
    missing = [
        text for text, value, digit in figures(page) if not any(abs(value - k) <= digit for k in known)
    ]
    if missing:
        raise ValueError(
            f"no result of the page has {', '.join(missing)}; name its file by a table or figures"
        )
    return MARKER.sub(lambda found: table(found[2]) if found[1] == "table" else "", page)


def table(name: str) -> str:
    """A table by its name, or all of a file."""
    return TABLES[name].markdown() if name in TABLES else whole_table(name)


def files_of(name: str) -> tuple[str, ...]:
    """The results of a table."""
    return TABLES[name].files if name in TABLES else (name,)


def figures(page: str) -> Iterator[tuple[str, float, float]]:
    """The figures that a page has itself: texts, values in GiB or seconds, half of their last digits."""
    text = _VERSION.sub("", _NOT_SENTENCES.sub("", page))
    for found in _FIGURE.finditer(text):
        number, unit = found.groups()
        if unit or "." in number:
            scale = _SCALE.get(unit, 1)
            digits = len(number.partition(".")[2])
            yield found[0], float(number.replace(",", "")) * scale, 0.5001 * 10**-digits * scale


def _known(page: str) -> set[float]:
    """The numbers in the tables of a page, and of all rows of their files."""
    names = [name for _, name in MARKER.findall(page)]
    shown = re.findall(r"\d[\d,]*\.?\d*", "".join(table(name) for name in names))
    files = {file for name in names for file in files_of(name)}
    return {float(number.replace(",", "")) for number in shown}.union(*(values(file) for file in files))
