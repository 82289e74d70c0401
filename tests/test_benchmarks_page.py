"""Tables and figures of the documentation are those of the results, by commands that
exist.
"""

import importlib.util
import json
import re
import shlex

import pytest

import benchmarks.qwen3_context as qwen3_context
import benchmarks.step_memory as step_memory
from benchmarks.record import RESULTS
from scripts.page_tables import MARKER, declared, figures, with_tables
from scripts.reported_memory import cases
from stacked_remat.training import parse_config

ROOT = RESULTS.parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
MARKED = {
    own
    for text in PAGES.values()
    for kind, own in MARKER.findall(text)
    if kind == "table"
}


def test_every_result_is_in_a_table_and_every_command_exists():
    results = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.json")}
    assert all(declared(text).rows for text in MARKED)
    shown = {file for text in MARKED for file in declared(text).files}
    assert results == shown | {case["source"] for case in cases()}
    commands = set(re.findall(r"\bbenchmarks\.(\w+)", PAGES["docs/benchmarks.md"]))
    assert commands and all(
        importlib.util.find_spec(f"benchmarks.{name}") for name in commands
    )


BENCHMARKS = {"qwen3_context": qwen3_context, "step_memory": step_memory}
COMMAND = re.compile(
    rf"(?:`|^)(?:python -m )?benchmarks\.({'|'.join(BENCHMARKS)})"
    r" ([^`\n]+(?:\nmodels/[^`\n]+)*)",
    re.MULTILINE,
)


def _commands():
    """What pages have beside figures of decoders."""
    for page in sorted(PAGES.keys() - {"docs/benchmarks.md"}):
        for name, given in COMMAND.findall(PAGES[page].replace("\\\n", " ")):
            yield BENCHMARKS[name], shlex.split(given)


class _Parsed(Exception):
    pass


def _stop_when_parsed(kind, arguments):
    raise _Parsed(parse_config(kind, arguments))


def test_commands_of_figures_are_accepted(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [*_commands()]
    for benchmark, arguments in commands:
        monkeypatch.setattr(benchmark, "parse_config", _stop_when_parsed)
        with pytest.raises(_Parsed):
            benchmark.main(arguments)
    assert len(commands) >= 15


def _rows(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]


def _lines(page, of):
    """The cells of the first table of a page that has these words in its
    declaration.
    """
    text = next(text for _, text in MARKER.findall(PAGES[page]) if of in text)
    return [
        line.strip("| ").split(" | ") for line in declared(text).markdown().splitlines()
    ]


def test_a_part_of_results_has_their_values_in_columns_by_what_was_given():
    stacks = _rows("stack_memory_h200.json")
    [tpu] = (
        row
        for row in _rows("stack_memory_v5p.json")
        if row["name"] == "lax.scan" and row["inner"] == 2048
    )
    scan = [row for row in stacks if row["name"] == "lax.scan"]
    [false] = (
        row
        for row in stacks
        if row["name"] == "stacked_remat False" and row["inner"] == 2048
    )
    head, _, first, *_ = _lines("docs/nested-remat.md", "stack_memory_v5p")
    assert head[2:] == [
        f"{device}, inner {width}"
        for device in ("h200", "v5p")
        for width in ("2,048", "16,384")
    ]
    memory = [f"{row['temporaries'] / 2**30:.2f}" for row in (*scan, tpu)]
    ratio = f"{scan[0]['matmul_flops'] / false['matmul_flops']:.2f}"
    # The TPU's compiler ran out of memory
    assert first == [
        "lax.scan",
        ratio,
        *memory,
        "–",
    ]


def test_every_page_has_the_figures_of_the_results():
    for text in PAGES.values():
        # Also in the words for the README's picture
        with_tables(text.replace('<img alt="Temporaries', ""))


def test_a_figure_that_no_result_has_is_an_error():
    page = (
        "It takes {} of `80 GiB` with jaxlib 0.10.2.\n\n<!-- figures:"
        " qwen3_context_h200.json -->\n"
    )
    [found] = (
        row["temporaries"] / 2**20
        for row in _rows("qwen3_context_h200.json")
        if (row["tokens"], row["policy"]) == (65_536, "nested")
    )
    gib = found / 1024
    for true in (f"{gib:.2f} GiB", f"{gib:.1f} GiB", f"{found:,.0f} MiB"):
        assert true in with_tables(page.format(true))
    for wrong in (
        f"{gib + 0.02:.2f} GiB",
        f"{gib + 0.3:.1f}",
        f"{found - 42:,.0f} MiB",
        f"{gib:.2f} s\n| 8.03 |",
    ):
        with pytest.raises(
            ValueError, match=re.escape(wrong.split()[-2] if "|" in wrong else wrong)
        ):
            with_tables(page.format(wrong))
    assert not list(
        figures(
            "Qwen3-30B-A3B, `1.5 GiB`, 48 layers of 65,536 tokens, [a](b-1.5.md),"
            " Apache-2.0"
        )
    )
