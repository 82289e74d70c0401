"""Draws how many planted wrong labels are found among the examples with the lowest scores.

python -m scripts.planted_chart

Reads `benchmarks/results/planted_examples.json`, which `python -m benchmarks.planted_examples` writes, and
writes `planted_examples.svg` beside it.
"""

import json
from pathlib import Path
from typing import Any

from scripts.memory_chart import text, write
from scripts.result_tables import RESULTS

_SIZE, _LEFT, _TOP = 260, 70, 30
_STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#768390}.end{text-anchor:end}.middle{text-anchor:middle}"
    "line,polyline{fill:none;stroke:#768390}.grid{opacity:.3}.chance{stroke-dasharray:3 4}"
    ".found{stroke:#e15759;stroke-width:2.5}"
)


def picture(result: dict[str, Any]) -> str:
    """The curve of these results as an SVG, beside that of examples in random order."""
    parts = []
    for tenth in range(0, 11, 2):
        x, y = _at(tenth / 10, tenth / 10)
        parts += [_line(x, _TOP, x, _TOP + _SIZE), _line(_LEFT, y, _LEFT + _SIZE, y)]
        parts += [text(x, _TOP + _SIZE + 20, f"{tenth * 10}%", "middle")]
        parts += [text(_LEFT - 8, y + 5, f"{tenth * 10}%", "end")]
    found = result["found"]
    curve = " ".join(",".join(map(str, _at(k / (len(found) - 1), share))) for k, share in enumerate(found))
    parts += [_line(*_at(0, 0), *_at(1, 1), style="chance"), f'<polyline class="found" points="{curve}"/>\n']
    parts += [text(0, 16, "wrong labels found", ""), text(*_at(0.58, 0.5), "in random order", "")]
    parts += [text(_LEFT + _SIZE / 2, _TOP + _SIZE + 44, "examples looked at, lowest scores first", "middle")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="400" viewBox="0 0 400 {_TOP + _SIZE + 54}">'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _at(x: float, y: float) -> tuple[float, float]:
    return round(_LEFT + x * _SIZE, 1), round(_TOP + (1 - y) * _SIZE, 1)


def _line(x: float, y: float, to_x: float, to_y: float, style: str = "grid") -> str:
    return f'<line class="{style}" x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}"/>\n'


def drawn() -> dict[Path, str]:
    """The picture of the results, by its path."""
    source = RESULTS / "planted_examples.json"
    return {source.with_suffix(".svg"): picture(json.loads(source.read_text(encoding="utf-8")))}


if __name__ == "__main__":
    write(drawn())
