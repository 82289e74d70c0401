"""Draws the charts of results, which the README and pages show.

python -m scripts.charts
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.record import RESULTS

PICTURES = RESULTS.parents[1] / "docs" / "pictures"

OURS = ("True", "nested", "nested + offload", "max_carries=6", "offload")
PEERS = (
    "lax.scan",
    "levanter ArrayStacked nested",
    "haliax nested",
    "flax nnx.scan + nnx.remat",
    "lax.scan + jax.checkpoint",
    "haliax True",
    "levanter ArrayStacked True",
    "flax linen remat_scan, 2 levels",
    "flax linen remat_scan, 3 levels",
    "haliax offload",
)
"""The rows that the chart of memory shows."""
THEMES = {
    "light": ("#1f2328", "#8c959f", "#0969da"),
    "dark": ("#f0f6fc", "#8b949e", "#4493f8"),
}
"""Colours of text, of other libraries, and of this one."""

OURS_IS: dict[str, Any] = {"hatch": "///", "edgecolor": "white", "linewidth": 0}
"""How bars of this library look beside their colour, which not everyone can tell."""

LOOPS = ("True", "nested", "max_carries=20")
"""The rows of this library in the chart of long loops, which shows those of all others
too.
"""


def charts() -> Iterator[tuple[Path, Figure]]:
    """Every chart, by its path."""
    found, loops = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("stack_memory_h200", "long_loops_cpu")
    )
    for theme, colors in THEMES.items():
        yield PICTURES / f"memory_chart_{theme}.svg", memory_chart(found, colors)
        yield PICTURES / f"loops_chart_{theme}.svg", loops_chart(loops, colors)


def memory_chart(result: Mapping[str, Any], colors: Sequence[str]) -> Figure:
    """Temporaries of each variant on the device and the host, with narrow layers."""
    text, peers, ours = colors
    inner = 2_048
    rows = {row["name"]: row for row in result["rows"] if row["inner"] == inner}
    names = [*PEERS, *(f"stacked_remat {name}" for name in OURS)]
    device, host = (
        [rows[name][key] / 2**30 for name in names]
        for key in ("temporaries", "host_temporaries")
    )
    first = result["rows"][0]
    version = result["versions"]["jax"]
    figure, axes = _axes(6.6, 1 + 0.27 * len(names), text)
    about = (
        "Temporaries of one gradient, GiB",
        (
            f"{first['layers']} layers x + silu(x·up)·down, width {first['width']:,},"
            f" inner width {inner:,},"
        ),
        (
            f"{first['tokens']:,} tokens, bfloat16; compiled for an"
            f" {result['target'].upper()} with JAX {version}, not run"
        ),
    )
    shades = [ours if name.startswith("stacked_remat") else peers for name in names]
    bars = axes.barh(range(len(names)), device, color=shades)
    ends = axes.barh(range(len(names)), host, left=device, color=shades, alpha=0.35)
    for bar, name in zip(bars, names, strict=True):
        if name.startswith("stacked_remat"):
            bar.set(**OURS_IS)
    values = [
        f"{a:.2f}" + (f" + {b:.2f}" if b else "")
        for a, b in zip(device, host, strict=True)
    ]
    axes.bar_label(ends, values, padding=4, color=text)
    axes.set_yticks(
        range(len(names)), [name.removeprefix("stacked_remat ") for name in names]
    )
    keys = {
        "stacked_remat": (ours, 1),
        "others": (peers, 1),
        "pale: on the host": (ours, 0.35),
    }
    patches = {
        # `color` would set that of the hatch too.
        label: Patch(facecolor=color, alpha=alpha)
        for label, (color, alpha) in keys.items()
    }
    patches["stacked_remat"].set(**OURS_IS)
    _legend(figure, patches, text, "\n".join(about))
    axes.set_xlabel("GiB", color=text)
    axes.set_xlim(0, max(a + b for a, b in zip(device, host, strict=True)) * 1.15)
    return figure


def loops_chart(result: Mapping[str, Any], colors: Sequence[str]) -> Figure:
    """Time and temporaries of the gradient of a loop over many small steps."""
    text, peers, ours = colors
    rows = {row["name"]: row for row in result["rows"] if row["case"] == "small state"}
    names = sorted(rows, key=lambda name: (name in LOOPS, -rows[name]["milliseconds"]))
    figure = Figure((6.6, 1 + 0.27 * len(names)), layout="constrained")
    every = figure.subplots(1, 2, sharey=True)
    columns = {
        "milliseconds": ("time", "milliseconds"),
        "temporary_kib": ("temporaries", "KiB, logarithmic"),
    }
    for axes, (key, (label, unit)) in zip(every, columns.items(), strict=True):
        _bare(axes, text)
        values = [rows[name][key] for name in names]
        bars = axes.barh(
            names, values, color=[ours if name in LOOPS else peers for name in names]
        )
        for bar, name in zip(bars, names, strict=True):
            if name in LOOPS:
                bar.set(**OURS_IS)
        axes.bar_label(bars, [f"{value:,}" for value in values], padding=4, color=text)
        axes.set_xlabel(unit, color=text)
        axes.set_title(label, loc="left", color=text, fontsize=10)
        axes.set_xlim(0, 1.25 * max(values))
    memory = [rows[name]["temporary_kib"] for name in names]
    # Or keeping every state would leave no room for the others
    every[1].set_xscale("log")
    every[1].set_xlim(min(memory) / 2, 10 * max(memory))
    every[0].invert_yaxis()
    about = (
        f"Gradient of {result['steps']:,} steps of a state of {result['size']:,}"
        " numbers"
    )
    of_ours = Patch(facecolor=ours, **OURS_IS)
    keys = {"stacked_remat": of_ours, "others": Patch(color=peers)}
    _legend(
        figure,
        keys,
        text,
        f"{about}, run on a CPU with JAX {result['versions']['jax']}",
    )
    return figure


def _axes(width: float, height: float, text: str) -> tuple[Figure, Axes]:
    """Axes with labels at the left and nothing else, the first row on top."""
    figure = Figure((width, height), layout="constrained")
    axes = figure.subplots()
    _bare(axes, text)
    axes.invert_yaxis()
    return figure, axes


def _bare(axes: Axes, text: str) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0, colors=text)
    axes.xaxis.label.set_color(text)
    axes.set_xticks([])  # each bar has its number


def _legend(
    figure: Figure, patches: Mapping[str, Patch], text: str, title: str | None = None
) -> None:
    legend = figure.legend(
        patches.values(),
        patches.keys(),
        loc="outside upper left",
        ncols=len(patches),
        frameon=False,
        handlelength=1,
        labelcolor=text,
        title=title,
        alignment="left",
    )
    legend.get_title().set_color(text)


def write(figure: Figure, path: Any) -> None:
    """Write an SVG whose words are text, and which is the same whenever it is drawn."""
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "stacked_remat"}
    ):
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    for _path, _figure in charts():
        write(_figure, _path)
