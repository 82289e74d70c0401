"""Draws `docs/pictures`: what lives when under a policy, from its schedule.

python -m scripts.schedule_pictures
"""

import itertools
from pathlib import Path
from typing import NamedTuple

from stacked_remat import ScanCheckpointPolicy
from stacked_remat._schedule import Schedule

LAYERS = 12
PICTURES = {
    "true": ScanCheckpointPolicy(),
    "nested": ScanCheckpointPolicy(nested=True),
    "max_carries": ScanCheckpointPolicy(max_carries=3),
    "offload": ScanCheckpointPolicy(save_carries="offload"),
    "nested_offload": ScanCheckpointPolicy(nested=True, save_carries="offload"),
}
"""The policies that `docs/what-lives-when.md` shows, by the names of their files."""

_COLORS = {
    "device": "#4c78a8",
    "host": "#b07aa1",
    "forward": "#59a14f",
    "replay": "#f28e2b",
    "visit": "#e15759",
}
_WIDTH, _MARGIN, _ROW, _STRIP = 760, 64, 18, 18


class Held(NamedTuple):
    """The input of a layer in a slot, from the step that writes it to after the step that reads it last."""

    slot: int
    layer: int
    first: int
    end: int


class Step(NamedTuple):
    """One layer that is computed: `forward`, `replay` or `visit`, which reverses it."""

    kind: str
    layer: int


def lifetimes(schedule: Schedule) -> tuple[list[Step], list[Held]]:
    """What is computed, one layer a step, and the carries held meanwhile that are read later."""
    steps: list[Step] = []
    written: dict[int, tuple[int, int]] = {}
    ends: dict[tuple[int, int, int], int] = {}

    def read(slot: int) -> None:
        ends[slot, *written[slot]] = len(steps) + 1

    for layer, slot in enumerate(schedule.forward):
        written[slot] = layer, len(steps)
        steps.append(Step("forward", layer))
    for run in schedule.runs:
        if run.writes:
            read(run.slot)
        for layer, slot in enumerate(run.writes, run.start):
            steps.append(Step("replay", layer))
            written[slot] = layer + 1, len(steps)
        for back in range(run.visits):
            read(run.top_slot - back)
            steps.append(Step("visit", run.top - back))
    held = [Held(slot, layer, first, end) for (slot, layer, first), end in ends.items()]
    return steps, sorted(held, key=lambda value: (value.slot, value.first))


def picture(policy: ScanCheckpointPolicy, layers: int = LAYERS) -> str:
    """An SVG of slots over time: a bar for each carry with its layer, and below it what is computed."""
    schedule = policy.schedule(layers)
    steps, held = lifetimes(schedule)
    starts = set(itertools.accumulate(schedule.segments[:-1], initial=0)) if policy.offloads else set()
    unit = (_WIDTH - _MARGIN) / len(steps)
    bottom = schedule.slots * _ROW + 6
    parts = []
    for value in held:
        kind = "host" if value.layer in starts else "device"
        box = _MARGIN + value.first * unit, value.slot * _ROW, (value.end - value.first) * unit, _ROW - 2
        parts.append(_box(kind, *box, str(value.layer)))
    for at, step in enumerate(steps):
        parts.append(_box(step.kind, _MARGIN + at * unit, bottom, unit, _STRIP, str(step.layer)))
    for slot in range(schedule.slots):
        parts.append(f'<text class="label" x="0" y="{slot * _ROW + 12}">slot {slot}</text>')
    parts.append(f'<text class="label" x="0" y="{bottom + 13}">computed</text>')
    parts.append(_key(bottom + _STRIP + 20, {"host": bool(starts), "replay": schedule.replays > 0}))
    height = bottom + _STRIP + 28
    style = (
        "text{font:10px sans-serif;fill:#fff;text-anchor:middle}"
        ".label{fill:#888;text-anchor:start;font-size:11px}rect{stroke:#fff;stroke-width:.5}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"><style>{style}</style>'
        + "".join(parts)
        + "</svg>\n"
    )


def _box(kind: str, x: float, y: float, width: float, height: float, label: str) -> str:
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{_COLORS[kind]}"/>'
    return box + f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}">{label}</text>'


def _key(y: float, shown: dict[str, bool]) -> str:
    names = {
        "device": "carry on the device",
        "host": "carry on the host",
        "forward": "forward",
        "replay": "replayed",
        "visit": "reversed",
    }
    parts, x = [], float(_MARGIN)
    for kind, name in names.items():
        if shown.get(kind, True):
            parts.append(f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{_COLORS[kind]}"/>')
            parts.append(f'<text class="label" x="{x + 14:.0f}" y="{y:.0f}">{name}</text>')
            x += 30 + 6 * len(name)
    return "".join(parts)


if __name__ == "__main__":
    for _name, _policy in PICTURES.items():
        path = Path(__file__).resolve().parents[1] / "docs" / "pictures" / f"{_name}.svg"
        path.write_text(picture(_policy), encoding="utf-8")
