"""Draws the README's chart, the memory of one model under each policy and in other libraries.

    python -m benchmarks.memory_chart

Reads `results/stack_memory_h200.json`, which `python -m benchmarks.stack_memory --target h200` writes, and
writes `results/memory_chart_light.svg` and `results/memory_chart_dark.svg` beside it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .record import RESULTS

SOURCE = RESULTS / "stack_memory_h200.json"
INNER = 2_048

SHOWN = (
    "lax.scan",
    "haliax nested",
    "flax nnx.scan + nnx.remat",
    "lax.scan + jax.checkpoint",
    "haliax True",
    "flax linen remat_scan, 3 levels",
    "haliax offload",
    "stacked_remat True",
    "stacked_remat nested",
    "stacked_remat nested + offload",
    "stacked_remat max_carries=6",
    "stacked_remat offload",
)


@dataclass(frozen=True)
class Bar:
    """The memory of a variant, in GiB: temporaries on the device, and what is on the host."""

    name: str
    device: float
    host: float

    @property
    def label(self) -> str:
        """What stands beside the bar."""
        return f"{self.device:.2f}" + (f" + {self.host:.2f} on the host" if self.host else "")


@dataclass(frozen=True)
class Theme:
    """Colours of one picture."""

    text: str
    peers: str
    ours: str


THEMES = {"light": Theme("#1f2328", "#8c959f", "#0969da"), "dark": Theme("#f0f6fc", "#8b949e", "#4493f8")}


def bars(rows: list[dict[str, Any]], names: tuple[str, ...] = SHOWN) -> list[Bar]:
    """The bars of these names, in their order, from the rows of the results."""
    found = {row["name"]: row for row in rows if row["inner"] == INNER}
    return [
        Bar(name, found[name]["temporaries"] / 2**30, found[name]["host_temporaries"] / 2**30)
        for name in names
    ]


def draw(shown: list[Bar], theme: Theme, title: str, path: Path) -> None:
    """Writes the picture, with letters as text and the same bytes every time."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "text.color": theme.text}):
        figure = Figure(figsize=(8.4, 4.2), layout="constrained", facecolor="none")
        axes = figure.add_subplot()
        for row, bar in enumerate(reversed(shown)):
            ours = bar.name.startswith("stacked_remat")
            color = theme.ours if ours else theme.peers
            axes.barh(row, bar.device, color=color, height=0.7)
            if bar.host:
                axes.barh(row, bar.host, left=bar.device, color=color, alpha=0.3, height=0.7)
            weight = "bold" if ours else "normal"
            end = bar.device + bar.host + 0.6
            axes.text(end, row, bar.label, va="center", fontsize=9, weight=weight)
        axes.set_yticks(range(len(shown)), [bar.name for bar in reversed(shown)], color=theme.text)
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.set_xlim(0, 1.08 * max(bar.device + bar.host for bar in shown))
        axes.margins(y=0.01)
        axes.spines[:].set_visible(False)
        axes.patch.set_visible(False)
        axes.set_title(title, fontsize=10, loc="left", color=theme.text)
        FigureCanvasSVG(figure).print_svg(str(path), metadata={"Date": None, "Creator": None})


def main() -> None:
    found = json.loads(SOURCE.read_text())
    first, device = found["rows"][0], found["target"].upper()
    title = (
        f"Temporaries of one gradient in GiB (pale: on the host), compiled for an {device}:\n"
        f"{first['layers']} layers, {first['tokens']:,} tokens of width {first['width']:,}, bfloat16"
    )
    for name, theme in THEMES.items():
        path = RESULTS / f"memory_chart_{name}.svg"
        draw(bars(found["rows"]), theme, title, path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
