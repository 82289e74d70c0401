"""Rankings of examples, and the shares of layers, as tables in a terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._pictures import text_bars
from .ranking import (
    NORMALIZATIONS,
    ExampleRanking,
    RankedExample,
    finite_rows,
    sums_of_steps,
)

SIGN = "above zero where training on the example lowers the validation loss"
_SIGN_OF_TOKENS = (
    "; green tokens lower it, red ones raise it, those between « and » most of all"
)
_LONGEST_TEXT = 160  # characters of an example that are shown
_BINS = 24  # of the scores of all examples
_WIDTHS = {"place": 1, "text": 2}  # of columns that share what the others leave


def heading(ranking: ExampleRanking, count: int, best: bool, normalize: str) -> str:
    """What a table or picture of some examples of a ranking shows."""
    what = "highest" if best else "lowest"
    return (
        f"The {count} {what} scores of {len(ranking.ids):,} examples; scores"
        f" {NORMALIZATIONS[normalize]}, {SIGN}"
    )


def print_examples(
    found: Sequence[RankedExample], ranking: ExampleRanking, title: str
) -> None:
    """Prints examples with their text, and how the scores of all examples are
    distributed.
    """
    if any(example.tokens is not None for example in found):
        title += _SIGN_OF_TOKENS
    # Where an example has a place, its id says nothing to a reader.
    column = "place" if any(example.place for example in found) else "example"
    columns = {"score": "right", "steps": "right", column: "left", "text": "left"}
    lines = []
    for example in found:
        name = _from_here(example.place) or example.example
        text = example.text if example.tokens is None else _marked(example)
        lines.append((f"{example.score:+.3f}", str(example.steps), name, text))
    _print(title, columns, lines)
    print(_distribution(ranking.scores))


def _distribution(scores: np.ndarray) -> str:
    """The numbers of examples from the lowest to the highest score, as bars."""
    counts, _ = np.histogram(scores, min(_BINS, len(scores)))
    bars = text_bars(counts.tolist(), low=0)
    return f"All {len(scores):,} scores: {min(scores):+.3f} {bars} {max(scores):+.3f}"


def _from_here(place: str) -> str:
    """A place without the working folder."""
    return place.replace(f"{Path.cwd()}/", "")


def print_layers(folder: Path, count: int, **selected: Any) -> None:
    """Prints the share of the scores of each layer, and of the leaves with the largest
    shares.

    Every step counts the same. Sums are of scores, divided by the sum of all absolute
    scores.
    """
    table = finite_rows(folder, ["step", "layer", "leaf", "score"], selected)
    scores = table["score"].to_numpy().astype(np.float64)
    scores = scores / sums_of_steps(table, scores) / len(table["step"].unique())
    # The layers of each stack are counted from 0.
    stacks = [leaf.partition(".*")[0] for leaf in table["leaf"].to_pylist()]
    table = table.append_column("sum", [scores])
    table = table.append_column("share", [np.abs(scores)])
    table = table.append_column("stack", [stacks])

    def sums(*by: str) -> list[dict[str, Any]]:
        """From the smallest share."""
        found = table.group_by([*by], use_threads=False).aggregate(
            [("share", "sum"), ("sum", "sum")]
        )
        return sorted(found.to_pylist(), key=lambda one: one["share_sum"])

    def shown(one: dict[str, Any]) -> tuple[str, str]:
        return f"{one['share_sum']:.1%}", f"{one['sum_sum']:+.3f}"

    columns = {"share": "right", "sum": "right"}
    largest = {}
    for one in sums("stack", "layer", "leaf"):
        largest[one["stack"], one["layer"]] = one["leaf"]
    by_layer = {}
    for one in sums("stack", "layer"):
        if one["layer"] is not None:
            by_layer[one["stack"], one["layer"]] = one
    if by_layer:
        has_kinds = len({stack for stack, _ in by_layer}) > 1
        lines = []
        for (stack, layer), one in sorted(by_layer.items()):
            kind = stack.rpartition(".")[2] + " " if has_kinds else ""
            lines.append((f"{kind}{layer}", *shown(one), largest[stack, layer]))
        title = f"The layers' shares of the absolute scores, and their sums, {SIGN}"
        _print(title, {"layer": "right", **columns, "largest leaf": "left"}, lines)
    else:
        print("These scores are not of layers, as with ghost.by_token and of replays.")
    lines = [(one["leaf"], *shown(one)) for one in sums("leaf")[::-1][:count]]
    _print("The largest leaves", {"leaf": "left", **columns}, lines)


def _marked(example: RankedExample) -> Any:
    """The text around the token of the largest score, with tokens in the colours of
    their signs.
    """
    from rich.text import Text

    assert example.tokens is not None
    scores, ends = example.tokens
    sizes = np.abs(scores)
    largest = float(sizes.max(initial=0.0))
    middle = int(ends[sizes.argmax()]) if len(ends) else 0
    first = max(0, min(middle - _LONGEST_TEXT // 2, len(example.text) - _LONGEST_TEXT))
    last = first + _LONGEST_TEXT
    text = Text("…" if first else "", overflow="fold")
    start = 0
    was_large = False
    for score, end in zip(scores.tolist(), ends.tolist(), strict=True):
        piece = _printable(example.text[max(start, first) : min(end, last)])
        start = end
        if not piece:
            continue
        # Small scores would colour the whole text.
        is_large = largest > 0 and abs(score) >= largest / 2
        style = ""
        if largest > 0 and abs(score) >= largest / 10:
            style = "green" if score > 0 else "red"
        if is_large != was_large:
            text.append("«" if is_large else "»")
        text.append(piece, style)
        was_large = is_large
    text.append("»" if was_large else "")
    text.append("…" if last < len(example.text) else "")
    return text


def _printable(text: str) -> str:
    """The text on one line, without control characters."""
    shown = ""
    for letter in text:
        if letter.isspace():
            shown += " "
        else:
            shown += letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
    return shown


def _print(title: str, columns: dict[str, Any], lines: Iterable[Sequence[Any]]) -> None:
    """Print a table, each text on one line, not as markup, without control characters,
    and short.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            "Printing needs rich: pip install 'stacked_remat[train]'."
        ) from error

    def plain(text: Any) -> Text:
        if isinstance(text, Text):
            return text
        kept = _printable(" ".join(text.split()))
        short = kept if len(kept) <= _LONGEST_TEXT else f"{kept[: _LONGEST_TEXT - 1]}…"
        return Text(short, overflow="fold")

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name, side in columns.items():
        table.add_column(name, justify=side, overflow="fold", ratio=_WIDTHS.get(name))
    for line in lines:
        table.add_row(*map(plain, line))
    Console().print(table)
