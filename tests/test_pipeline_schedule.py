"""The schedules of `pipeline`: tables of integers."""

from typing import Any

import pytest

from stacked_remat._pipeline.schedule import IDLE, make_schedule

SIZES = [(1, 1), (1, 3), (2, 4), (3, 2), (4, 8), (5, 5), (8, 32), (7, 20)]
NAMES = ["1f1b", "zero_bubble"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_every_operation_runs_once_and_after_what_it_needs(name, stages, microbatches):
    schedule = make_schedule(name, stages, microbatches)
    when: dict[Any, int] = {}
    for tick in range(schedule.ticks):
        for stage in range(stages):
            before = schedule.weights_done[max(tick - 1, 0), stage] if tick else 0
            for number in range(before, schedule.weights_done[tick, stage]):
                # Before the tick's F or B
                when["W", stage, number] = tick
            operation = schedule.operations[tick, stage]
            if operation != IDLE:
                key = "FB"[operation - 1], stage, int(schedule.numbers[tick, stage])
                assert key not in when
                when[key] = tick
    count = (3 if name == "zero_bubble" else 2) * stages * microbatches
    assert len(when) == count
    for number in range(microbatches):
        for stage in range(stages):
            forward, backward = when["F", stage, number], when["B", stage, number]
            assert forward < backward
            # What a neighbour sends is there for the next tick alone
            if stage:
                assert forward == when["F", stage - 1, number] + 1
                assert (when["B", stage - 1, number]) == backward + 1
                sender = when["F", stage - 1, number]
                assert sender % 2 == (stage - 1) % 2
            if name == "zero_bubble":
                assert backward < when["W", stage, number]


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_idle_time(stages, microbatches):
    bound = (stages - 1) / (microbatches + stages - 1)
    plain = make_schedule("1f1b", stages, microbatches)
    divided = make_schedule("zero_bubble", stages, microbatches)
    for costs in [(1, 1, 1), (1, 3, 1), (2, 3, 4)]:
        assert plain.idle(costs) == pytest.approx(bound)
        assert divided.span(costs) <= plain.span(costs)
    assert plain.span() == 3 * (microbatches + stages - 1)
    if microbatches >= stages:
        # Idle units of each stage: a third, and no schedule has fewer
        assert divided.span() == 3 * microbatches + stages - 1
        # With a backward pass that runs the stage again first
        for costs in [(1, 2, 1), (1, 3, 1)]:
            forward, backward, weights = costs
            assert divided.span(costs) == (
                microbatches * (forward + backward + weights)
                + (stages - 1) * (forward + backward - weights)
            )


@pytest.mark.parametrize("stages, microbatches", SIZES)
def test_microbatches_at_once(stages, microbatches):
    in_flight = [min(stages - stage, microbatches) for stage in range(stages)]
    for name in NAMES:
        assert make_schedule(name, stages, microbatches).in_flight() == in_flight
    waiting = make_schedule("zero_bubble", stages, microbatches).weights_waiting()
    assert max(waiting) <= min(stages, microbatches)
    assert make_schedule("1f1b", stages, microbatches).weights_waiting() == [0] * stages


def test_drawing():
    assert make_schedule("1f1b", 2, 3).draw().splitlines() == [
        "F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2",
        ".  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .",
    ]
    assert make_schedule("zero_bubble", 2, 3).draw().splitlines() == [
        "F0 F1 .  B0 W0 F2 B1 W1 B2 W2",
        ".  F0 B0 F1 W0 B1 F2 B2 W1 W2",
    ]
