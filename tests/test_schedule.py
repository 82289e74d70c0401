"""Schedules are correct and cost what they say, by a simulation that executes them."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from checkpoint_schedules import EndReverse, Forward, MultistageCheckpointSchedule
from haliax import Axis
from hypothesis import given, settings, strategies as st

from stacked_remat import BlockSeq, ScanCheckpointPolicy, fold
from stacked_remat._schedule import Schedule, Tree, bounded, equal, shrinking

lengths = st.integers(1, 70)
NESTED = ScanCheckpointPolicy(nested=True)


def execute(schedule: Schedule) -> tuple[int, int]:
    """Runs a schedule on symbolic carries; returns the most carries alive and the
    number of replays.

    The value of a carry is the number of the layer that it is the input of. It is alive
    from its write to the last time that it is read.
    """
    slots: dict[int, int] = {}
    for layer, slot in enumerate(schedule.forward):
        slots[slot] = layer
    log: list[tuple[str, int, int]] = [
        ("write", slot, layer) for slot, layer in slots.items()
    ]
    replays, visited = 0, []
    for run in schedule.runs:
        assert slots[run.slot] == run.start, "a replay starts from a carry that is held"
        log.append(("read", run.slot, run.start))
        carry = run.start
        for slot in run.writes:
            carry += 1
            replays += 1
            slots[slot] = carry
            log.append(("write", slot, carry))
        for k in range(run.visits):
            slot, layer = run.top_slot - k, run.top - k
            assert slots[slot] == layer, "a visited layer's input is held"
            log.append(("read", slot, layer))
            visited.append(layer)
    assert visited == list(range(schedule.length))[::-1]
    return most_alive(log), replays


def execute_with_internals(schedule: Schedule) -> None:
    """Runs a schedule where all visited layers run again first, from an input in one of
    some slots.
    """
    held = {
        slot: layer
        for layer, slot in enumerate(schedule.forward)
        if slot < schedule.sources
    }
    for run in schedule.runs:
        bottom, slot = run.top - run.visits + 1, run.top_slot - run.visits + 1
        count = max(0, bottom - run.start)
        assert not count or held[run.slot] == run.start
        held |= zip(run.writes[:count], range(run.start + 1, bottom + 1), strict=True)
        assert held[slot] == bottom
        assert max(held) < schedule.sources


def most_alive(log: list[tuple[str, int, int]]) -> int:
    """The most values that were written and will still be read, backwards over the
    log.
    """
    alive: set[tuple[int, int]] = set()
    most = 0
    for kind, slot, layer in reversed(log):
        (alive.add if kind == "read" else alive.discard)((slot, layer))
        most = max(most, len(alive))
    return most


def check(schedule: Schedule, length: int) -> None:
    alive, replays = execute(schedule)
    execute_with_internals(schedule)
    used = {*schedule.forward, *(slot for run in schedule.runs for slot in run.writes)}
    assert schedule.length == length == len(schedule.forward)
    assert used == set(range(schedule.slots))
    assert schedule.slots == alive
    assert schedule.replays == replays
    if schedule.segments:
        assert sum(schedule.segments) == length


@given(lengths)
def test_shrinking(length: int):
    schedule = shrinking(length)
    check(schedule, length)
    slots = schedule.slots
    assert slots * (slots - 1) // 2 < length <= slots * (slots + 1) // 2
    assert schedule.replays <= length - len(schedule.segments)


@given(lengths, st.integers(1, 80))
def test_equal(length: int, segments: int):
    schedule = equal(length, segments)
    check(schedule, length)
    assert len(schedule.segments) == min(segments, length)
    assert max(schedule.segments) - min(schedule.segments) <= 1
    assert schedule.replays <= length - len(schedule.segments)
    if length % segments == 0:
        assert len({(run.replays, run.visits) for run in schedule.runs}) == 1


def fewest_replays(length: int, carries: int) -> int:
    """Of another implementation of binomial checkpointing, which does not visit the
    last layer twice.
    """
    schedule = MultistageCheckpointSchedule(length, min(carries - 1, length), 0)
    steps = itertools.takewhile(
        lambda action: not isinstance(action, EndReverse), schedule
    )
    evaluations = sum(
        action.n1 - action.n0 for action in steps if isinstance(action, Forward)
    )
    return evaluations + 1 - 2 * length


@settings(max_examples=60)
@given(lengths, st.integers(2, 20))
def test_bounded_is_optimal(length: int, carries: int):
    schedule = bounded(length, max_carries=carries)
    check(schedule, length)
    assert schedule.slots <= carries
    assert schedule.replays == fewest_replays(length, carries)


def test_long_sequences_are_cheap_to_cut():
    check(bounded(520, max_carries=2), 520)
    check(bounded(2_000, max_carries=8), 2_000)
    many = 1_000_000
    cuts = [shrinking(many), equal(many, many)]
    cuts += [bounded(many, max_carries=carries) for carries in (3, 20)]
    assert [cut.slots for cut in cuts] == [1414, many, 3, 20]
    assert not any({"forward", "runs", "replays"} & {*vars(cut)} for cut in cuts)
    assert len(cuts[0].runs) == len(cuts[0].segments)
    few = bounded(10_000, max_carries=2)  # which runs layers again 50 million times
    assert sum(1 + len(run.holds) for run in few.runs) < 2 * few.length


def test_the_forward_pass_reads_no_schedule(monkeypatch: pytest.MonkeyPatch):
    def fail(self: Schedule) -> None:
        raise AssertionError("the cut is computed")

    monkeypatch.setattr(Schedule, "_expansions", fail)
    for policy in (
        ScanCheckpointPolicy(nested=True),
        ScanCheckpointPolicy(max_carries=3),
    ):
        run = fold(lambda x, w: x * w, Axis("t", 12), remat=policy)
        jax.make_jaxpr(run)(jnp.float32(1), jnp.ones(12))
        with pytest.raises(AssertionError, match="the cut is computed"):
            jax.make_jaxpr(jax.grad(run))(jnp.float32(1), jnp.ones(12))


@given(st.integers(1, 60), st.integers(2, 12))
def test_parts_within_parts(length: int, carries: int):
    def layers(tree: tuple[Tree, ...]) -> list[int]:
        return [
            n
            for part in tree
            for n in ([part] if isinstance(part, int) else layers(part))
        ]

    for cut in (shrinking(length), bounded(length, max_carries=carries)):
        if cut.length < 50 or carries > 2:
            assert layers(cut.tree) == list(range(length))


def test_parts_that_are_nested_too_deep_for_a_checkpoint_in_each():
    too_deep = (
        "2 carries for 520 layers .* Give a larger max_carries, or let the layers be a"
        " Stacked"
    )
    with pytest.raises(ValueError, match=too_deep):
        BlockSeq.of([jnp.sin] * 520, remat=ScanCheckpointPolicy(max_carries=2)).fold(
            jnp.ones(2)
        )


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: NESTED.schedule(0), ValueError, "length .* at least 1; got 0"),
        (lambda: NESTED.schedule(True), TypeError, "length .*an int.; got True"),
    ],
)
def test_errors(build, error, match):
    with pytest.raises(error, match=match):
        build()
