"""The picture of memory against FLOPs that `plan_lm --find frontier` writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from stacked_remat._pictures import new_figure, save_figure


def write_picture(
    rows: Sequence[Mapping[str, Any]],
    path: str,
    base: tuple[str, int],
    budget: int | None = None,
) -> None:
    """Write a step curve through the policies of `Frontier.rows`, with a line at the
    budget.

    FLOPs are relative to those of a policy, the base: its name, and its FLOPs.
    """
    figure = new_figure("picture", 7, 4)
    gib = [row["total"] / 2**30 for row in rows]
    base_name, base_flops = base
    flops = [row["matmul_flops"] / max(base_flops, 1) for row in rows]
    axes = figure.subplots()
    # Up to the next policy a larger budget plans the one before it.
    axes.step(gib, flops, where="post", marker="o")
    for row, x, y in zip(rows, gib, flops, strict=True):
        axes.annotate(_short(row["policy"]), (x, y), (4, 4), **_LABEL)
    if budget is not None:
        axes.axvline(budget / 2**30, linestyle=":", color="gray")
    axes.set_xlabel("memory of a device, GiB")
    axes.set_ylabel(f"FLOPs / {base_name}")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


_LABEL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7}
_START = 14  # characters that are left of a long name
_END = 26


def _short(policy: str) -> str:
    """A policy's name; of a long one the start, and the end, in which names of the same
    kind differ.
    """
    if len(policy) <= _START + _END:
        return policy
    return f"{policy[:_START]}…{policy[-_END:]}"
