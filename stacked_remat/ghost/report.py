"""Prints and plots ranked examples and the scores of layers."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .ranking import NORMALIZATIONS, ExampleRanking, Selection

_LONGEST_TEXT = 160  # letters of an example that are shown


def print_examples(selected: Selection, ranked: ExampleRanking, count: int, *, best: bool) -> np.ndarray:
    """Prints the examples with the highest scores, or the lowest, with their text.

    Returns:
        Their places in `ranked`, the most extreme one first.

    Raises:
        ImportError: rich is not installed; names the extra.
    """
    places = np.arange(len(ranked.ids))
    chosen = (places if best else places[::-1])[:count]
    texts = _texts(selected, [str(name) for name in ranked.ids[chosen]])
    what = "most helpful" if best else "most harmful"
    table = _table(
        f"The {len(chosen)} {what} of {len(places):,} examples; scores {NORMALIZATIONS[selected.normalize]}",
        {"score": "right", "steps": "right", "example": "left", "text": "left"},
    )
    for at in chosen:
        name = str(ranked.ids[at])
        table.add_row(f"{ranked.scores[at]:+.3f}", f"{ranked.steps[at]}", _plain(name), _plain(texts[name]))
    _print(table)
    return chosen


def print_layers(parts: Sequence[dict[str, Any]], count: int) -> None:
    """Prints the share of the scores of each layer, and of the leaves with the largest shares.

    Args:
        parts: what `score_leaves` returned.
        count: how many leaves to print.

    Raises:
        ImportError: rich is not installed; names the extra.
    """
    layers = _table(
        "The layers' shares of the absolute scores",
        {"layer": "right", "share": "right", "sum": "right", "largest leaf": "left"},
    )
    for layer, own in _by([one for one in parts if one["layer"] is not None], "layer"):
        largest = max(own, key=lambda one: one["share"])
        layers.add_row(str(layer), *_sums(own), _plain(largest["leaf"]))
    table = _table("The largest leaves", {"leaf": "left", "share": "right", "sum": "right"})
    for leaf, own in sorted(_by(parts, "leaf"), key=lambda pair: -sum(one["share"] for one in pair[1]))[
        :count
    ]:
        table.add_row(_plain(leaf), *_sums(own))
    if layers.row_count:
        _print(layers)
    _print(table)


def _by(parts: Sequence[dict[str, Any]], name: str) -> list[tuple[Any, list[dict[str, Any]]]]:
    """The parts with each value of a column, in its order."""
    found = defaultdict(list)
    for one in parts:
        found[one[name]].append(one)
    return sorted(found.items())


def _sums(parts: Sequence[dict[str, Any]]) -> tuple[str, str]:
    share, total = (sum(one[name] for one in parts) for name in ("share", "sum"))
    return f"{share:.1%}", f"{total:+.3f}"


def plot_examples(ranked: ExampleRanking, chosen: np.ndarray, path: Path, *, best: bool) -> Path:
    """Plots the scores of all examples, sorted, with the chosen ones marked, as a PNG; returns `path`.

    Raises:
        ImportError: matplotlib is not installed; names the extra.
    """
    figure = _figure((8, 4))
    axes = figure.add_subplot()
    axes.plot(np.arange(len(ranked.ids)), ranked.scores, color="C0", label="all examples")
    label = f"the {len(chosen)} most {'helpful' if best else 'harmful'}"
    axes.plot(chosen, ranked.scores[chosen], "o", color="C2" if best else "C3", label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("examples, from the most helpful to the most harmful")
    axes.set_ylabel("mean score")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")
    return path


def plot_layers(parts: Sequence[dict[str, Any]], path: Path) -> Path:
    """Plots the share of the absolute scores of each leaf in each layer, as a PNG; returns `path`.

    Raises:
        ImportError: matplotlib is not installed; names the extra.
    """
    leaves = _by(parts, "leaf")
    figure = _figure((9, 1.5 + 0.3 * len(leaves)))
    axes = figure.add_subplot()
    shares = np.full((len(leaves), 1 + max(one["layer"] or 0 for one in parts)), np.nan)
    for row, (_, own) in enumerate(leaves):
        for one in own:
            shares[row, one["layer"] or 0] = one["share"]
    picture = axes.imshow(shares, aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(leaves)), [_plain(leaf).plain for leaf, _ in leaves], fontsize="small")
    axes.set_xlabel("layer (leaves outside of stacks are in the first column)")
    figure.colorbar(picture, label="share of the absolute scores")
    figure.savefig(path, format="png")
    return path


def _texts(selected: Selection, examples: Sequence[str]) -> dict[str, str]:
    rows = selected.rows("example", "text", examples=examples)
    names, texts = (rows[name].to_pylist() for name in ("example", "text"))
    return dict(zip(names, texts, strict=True))


def _plain(text: str) -> Any:
    """A text on one line, as a rich `Text`: not markup, without control characters, and short."""
    from rich.text import Text

    spaced = " ".join(text.split())
    kept = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in spaced)
    return Text(kept if len(kept) <= _LONGEST_TEXT else f"{kept[: _LONGEST_TEXT - 1]}…", overflow="fold")


def _table(title: str, columns: dict[str, Any]) -> Any:
    try:
        from rich import box
        from rich.table import Table
    except ImportError as error:
        raise ImportError("Printing needs rich: pip install 'stacked_remat[train]'.") from error
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name, side in columns.items():
        table.add_column(name, justify=side, overflow="fold", ratio=1 if name == "text" else None)
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    Console().print(table)


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'stacked_remat[plot]'.") from error
    return Figure(figsize=size, layout="constrained")
