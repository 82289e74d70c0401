"""Draws the README's chart: the memory of one model under each policy and in other libraries.

python -m scripts.memory_chart

Reads `benchmarks/results/stack_memory_h200.json`, which `python -m benchmarks.stack_memory --target h200`
writes, and writes `memory_chart_light.svg` and `memory_chart_dark.svg` beside it.
"""

import json
from typing import Any, NamedTuple

from scripts.result_tables import RESULTS

SOURCE = RESULTS / "stack_memory_h200.json"
INNER = 2_048

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
"""The rows that are shown, in their order, and what stands beside their bars."""

_WIDTH, _NAMES, _ROW, _HEADER = 540, 220, 24, 112
_VALUE = 60
"""Where the longest bar ends, there is this much left for its value."""


class Theme(NamedTuple):
    """Colours of one picture."""

    text: str
    peers: str
    ours: str


THEMES = {"light": Theme("#1f2328", "#8c959f", "#0969da"), "dark": Theme("#f0f6fc", "#8b949e", "#4493f8")}


class Bar(NamedTuple):
    """The memory of a variant in GiB: temporaries on the device, and what is on the host."""

    label: str
    ours: bool
    device: float
    host: float

    @property
    def value(self) -> str:
        """What stands at the end of the bar."""
        return f"{self.device:.2f}" + (f" + {self.host:.2f}" if self.host else "")


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """The bars of the variants in `LABELS`, from the rows of the results."""
    found = {row["name"]: row for row in rows if row["inner"] == INNER}
    sizes = {
        name: (found[name]["temporaries"] / 2**30, found[name]["host_temporaries"] / 2**30) for name in LABELS
    }
    return [Bar(LABELS[name], name.startswith("stacked_remat"), *sizes[name]) for name in LABELS]


def picture(result: dict[str, Any], theme: Theme) -> str:
    """The chart of these results as an SVG: a bar for each variant, below what was compiled and with what."""
    shown, first = bars(result["rows"]), result["rows"][0]
    unit = (_WIDTH - _NAMES - _VALUE) / max(bar.device + bar.host for bar in shown)
    lines = (
        f"{first['layers']} layers x + silu(x·up)·down, width {first['width']:,}, inner width {INNER:,},",
        f"{first['tokens']:,} tokens, bfloat16; compiled for an {result['target'].upper()}"
        f" with JAX {result['versions']['jax']}, not run",
    )
    parts = [_text(0, 18, "Temporaries of one gradient, GiB", "title")]
    parts += [_text(0, 42 + 19 * row, line, "small") for row, line in enumerate(lines)]
    for x, style, label in (
        (0, "ours", "stacked_remat"),
        (155, "peers", "others"),
        (240, "host", "pale: on the host"),
    ):
        parts += [_box(x, 83, 13, style), _text(x + 19, 96, label, "small")]
    for row, bar in enumerate(shown):
        style, y = "ours" if bar.ours else "peers", _HEADER + row * _ROW
        end = _NAMES + (bar.device + bar.host) * unit
        parts.append(_text(_NAMES - 8, y + 14, bar.label, f"name {style}-text"))
        parts.append(_box(_NAMES, y, bar.device * unit, style))
        if bar.host:
            parts.append(_box(_NAMES + bar.device * unit, y, bar.host * unit, f"{style} host"))
        parts.append(_text(end + 6, y + 14, bar.value, f"{style}-text"))
    height = _HEADER + len(shown) * _ROW
    style = (
        f"text{{font:15px system-ui,sans-serif;fill:{theme.text}}}.title{{font-size:18px;font-weight:600}}"
        f".small{{font-size:14px}}.name{{text-anchor:end}}.ours-text{{font-weight:600}}rect{{fill:{theme.peers}}}"
        f".ours{{fill:{theme.ours}}}.host{{opacity:.35}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="660" viewBox="0 0 {_WIDTH} {height}">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


def _box(x: float, y: float, width: float, style: str) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 7}"/>\n'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y}">{text}</text>\n'


def main() -> None:
    result = json.loads(SOURCE.read_text(encoding="utf-8"))
    for name, theme in THEMES.items():
        path = RESULTS / f"memory_chart_{name}.svg"
        path.write_text(picture(result, theme), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
