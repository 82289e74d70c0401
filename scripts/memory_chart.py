"""Draws charts for the README and pages: the memory of a model under each policy and in other libraries.

python -m scripts.memory_chart

Reads `benchmarks/results/stack_memory_h200.json`, which `python -m benchmarks.stack_memory --target h200`
writes, and writes `CHARTS` beside it, each as `NAME_light.svg` and `NAME_dark.svg`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from scripts.result_tables import RESULTS

SOURCE = RESULTS / "stack_memory_h200.json"

LABELS = {
    "lax.scan": "lax.scan",
    "haliax nested": "haliax nested",
    "flax nnx.scan + nnx.remat": "flax nnx.scan + nnx.remat",
    "lax.scan + jax.checkpoint": "lax.scan + jax.checkpoint",
    "haliax True": "haliax True",
    "flax linen remat_scan, 3 levels": "linen remat_scan, 3 levels",
    "haliax offload": "haliax offload",
    "stacked_remat True": "True",
    "stacked_remat nested": "nested",
    "stacked_remat nested + offload": "nested + offload",
    "stacked_remat max_carries=6": "max_carries=6",
    "stacked_remat offload": "offload",
}
"""The rows that charts show, in their order, and what stands beside their bars."""

_WIDTH, _NAMES, _VALUE, _RATIO, _ROW, _HEADER = 540, 220, 60, 55, 24, 112


class Chart(NamedTuple):
    """What a chart shows.

    Attributes:
        inner: inner width of the layers.
        without: row of `LABELS` that is left out, where its bar would leave no room for the others.
        arithmetic: whether a column has the arithmetic, relative to `True`.
    """

    inner: int
    without: str = ""
    arithmetic: bool = False


CHARTS = {"memory_chart": Chart(2_048), "memory_chart_16384": Chart(16_384, "lax.scan", arithmetic=True)}


class Theme(NamedTuple):
    """Colours of one picture."""

    text: str
    peers: str
    ours: str


THEMES = {"light": Theme("#1f2328", "#8c959f", "#0969da"), "dark": Theme("#f0f6fc", "#8b949e", "#4493f8")}


class Bar(NamedTuple):
    """Temporaries of a variant in GiB, on the device and on the host; arithmetic relative to `True`."""

    label: str
    ours: bool
    device: float
    host: float
    arithmetic: float

    @property
    def value(self) -> str:
        """What stands at the end of the bar."""
        return f"{self.device:.2f}" + (f" + {self.host:.2f}" if self.host else "")


def bars(rows: list[dict[str, Any]], chart: Chart) -> list[Bar]:
    """The bars of a chart, from the rows of the results."""
    found = {row["name"]: row for row in rows if row["inner"] == chart.inner}
    least = found["stacked_remat True"]["matmul_flops"]
    return [
        Bar(
            label,
            name.startswith("stacked_remat"),
            found[name]["temporaries"] / 2**30,
            found[name]["host_temporaries"] / 2**30,
            found[name]["matmul_flops"] / least,
        )
        for name, label in LABELS.items()
        if name != chart.without
    ]


def picture(result: dict[str, Any], chart: Chart, theme: Theme) -> str:
    """A chart of these results as an SVG: what was compiled and with what, and a bar for each variant."""
    shown, first = bars(result["rows"], chart), result["rows"][0]
    room = _WIDTH - _NAMES - _VALUE - (_RATIO if chart.arithmetic else 0)
    unit = room / max(bar.device + bar.host for bar in shown)
    lines = (
        f"{first['layers']} layers x + silu(x·up)·down, width {first['width']:,},"
        f" inner width {chart.inner:,},",
        f"{first['tokens']:,} tokens, bfloat16; compiled for an {result['target'].upper()}"
        f" with JAX {result['versions']['jax']}, not run",
    )
    parts = [text(0, 18, "Temporaries of one gradient, GiB", "title")]
    parts += [text(0, 42 + 19 * row, line, "small") for row, line in enumerate(lines)]
    legend = ((0, "ours", "stacked_remat"), (155, "peers", "others"), (240, "host", "pale: on the host"))
    for x, style, label in legend:
        parts += [_box(x, 83, 13, style), text(x + 19, 96, label, "small")]
    if chart.arithmetic:
        parts.append(text(_WIDTH, 96, "arithmetic", "small end"))
    for row, bar in enumerate(shown):
        style, y = "ours" if bar.ours else "peers", _HEADER + row * _ROW
        end = _NAMES + (bar.device + bar.host) * unit
        parts.append(text(_NAMES - 8, y + 14, bar.label, f"end {style}-text"))
        parts.append(_box(_NAMES, y, bar.device * unit, style))
        if bar.host:
            parts.append(_box(_NAMES + bar.device * unit, y, bar.host * unit, f"{style} host"))
        parts.append(text(end + 6, y + 14, bar.value, f"{style}-text"))
        if chart.arithmetic:
            parts.append(text(_WIDTH, y + 14, f"× {bar.arithmetic:.2f}", f"end {style}-text"))
    height = _HEADER + len(shown) * _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="660" viewBox="0 0 {_WIDTH} {height}">'
        f"<style>{_style(theme)}</style>{''.join(parts)}</svg>\n"
    )


def _style(theme: Theme) -> str:
    return (
        f"text{{font:15px system-ui,sans-serif;fill:{theme.text}}}.title{{font-size:18px;font-weight:600}}"
        f".small{{font-size:14px}}.end{{text-anchor:end}}.ours-text{{font-weight:600}}"
        f"rect{{fill:{theme.peers}}}.ours{{fill:{theme.ours}}}.host{{opacity:.35}}"
    )


def _box(x: float, y: float, width: float, style: str) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 7}"/>\n'


def text(x: float, y: float, words: str, style: str) -> str:
    """Words of an SVG, in a class of its style."""
    return f'<text class="{style}" x="{x:.1f}" y="{y}">{words}</text>\n'


def drawn() -> dict[Path, str]:
    """Every picture of the results, by its path."""
    result = json.loads(SOURCE.read_text(encoding="utf-8"))
    return {
        RESULTS / f"{name}_{shade}.svg": picture(result, chart, theme)
        for name, chart in CHARTS.items()
        for shade, theme in THEMES.items()
    }


def write(pictures: dict[Path, str]) -> None:
    """Write pictures to their paths."""
    for path, content in pictures.items():
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    write(drawn())
