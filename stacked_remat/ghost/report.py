"""Prints ranked examples and the scores of layers."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from .ranking import NORMALIZATIONS, ExampleRanking, Selection

_LONGEST_TEXT = 160  # letters of an example that are shown


def print_examples(selected: Selection, ranked: ExampleRanking, count: int, *, best: bool) -> None:
    """Prints the examples with the highest scores, or the lowest, with their text.

    Raises:
        ImportError: rich is not installed; names the extra.
    """
    numbers = np.arange(len(ranked.ids))
    chosen = (numbers if best else numbers[::-1])[:count]
    texts = _texts(selected, [str(name) for name in ranked.ids[chosen]])
    what = "most helpful" if best else "most harmful"
    table = _table(
        f"The {len(chosen)} {what} of {len(numbers):,} examples; scores {NORMALIZATIONS[selected.normalize]}",
        {"score": "right", "steps": "right", "example": "left", "text": "left"},
    )
    for at in chosen:
        name = str(ranked.ids[at])
        table.add_row(f"{ranked.scores[at]:+.3f}", f"{ranked.steps[at]}", _plain(name), _plain(texts[name]))
    _print(table)


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
