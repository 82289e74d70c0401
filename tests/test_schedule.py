"""Schedules are correct and cost what they say, by a simulation that executes them."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from checkpoint_schedules import (
    CheckpointSchedule,
    Copy,
    EndReverse,
    Forward,
    HRevolve,
    Move,
    MultistageCheckpointSchedule,
    StorageType,
    TwoLevelCheckpointSchedule,
)
from haliax import Axis
from hypothesis import given, settings, strategies as st

from stacked_remat import BlockSeq, ScanCheckpointPolicy, _schedule, fold
from stacked_remat._schedule import (
    Schedule,
    Tree,
    bounded,
    equal,
    off_device,
    shrinking,
)
from tests.programs import Execution

lengths = st.integers(1, 70)
NESTED = ScanCheckpointPolicy(nested=True)


def check(schedule: Schedule, length: int) -> None:
    executed = Execution(schedule.program())
    program = executed.program
    assert schedule.length == length == len(program.layers)
    assert executed.used == set(range(schedule.slots))
    assert program.slots == schedule.slots == executed.most_alive
    assert schedule.replays == sum(program.advances)
    assert program.holds_all == (len(program.held_layers) == schedule.replays)
    assert not executed.unread
    saved = Execution(schedule.program(saves=True), saves=True)
    assert not saved.unread
    if not schedule.segments:
        assert saved.program.sources == program.sources
    else:
        assert sum(schedule.segments) == length
        # Internals are those of one segment, a segment of one layer too.
        assert saved.program.sources == len(schedule.segments)
        assert saved.program.visits == schedule.segments[::-1]
        apart = off_device(schedule)
        for saves in (False, True):
            program = apart.program(saves=saves)
            Execution(program, saves=saves)
            assert len(program.stays) == len(schedule.segments)
            assert program.slots == max(schedule.segments) and program.sources == 1


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
        program = schedule.program()
        assert len({*zip(program.advances, program.visits, strict=True)}) == 1


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


def steps_and_writes(schedule: CheckpointSchedule, length: int) -> tuple[int, int]:
    """How many steps another implementation of two levels runs forward, counted as
    ours, and how many carries it writes to the disk.
    """
    steps = writes = 0
    for action in schedule:
        if isinstance(action, EndReverse):
            break
        to_disk = StorageType.DISK
        if isinstance(action, Forward):
            stop = min(action.n1, length)
            steps += stop - action.n0
            writes += action.write_ics and action.storage == to_disk
            if stop == length and schedule.max_n is None:
                schedule.finalize(length)
        elif isinstance(action, Copy | Move):
            writes += action.to_storage == to_disk
    # Ours do not run a layer for its visit.
    return steps - length, writes


@pytest.mark.parametrize("length", [48, 60, 144])
@pytest.mark.parametrize("carries", [3, 5])
def test_two_levels(length: int, carries: int):
    def steps(segments: int) -> int:
        schedule = off_device(equal(length, segments), carries)
        program = Execution(schedule.program()).program
        assert len(program.stays) == segments and program.slots == carries
        return length + schedule.replays

    # Two of the carries are in no snapshot of theirs: the one on disk, and the one of
    # the layer that is visited.
    snapshots = carries - 2
    for segments in (2, 4, 6):
        theirs = TwoLevelCheckpointSchedule(
            length // segments, snapshots, binomial_storage=StorageType.RAM
        )
        expected, writes = steps_and_writes(theirs, length)
        assert writes == segments and steps(segments) == expected
    # H-Revolve writes a place on the disk again once it is free, and does not run the
    # last segment twice, whose carries it keeps in the forward pass.
    found, writes = steps_and_writes(HRevolve(length, snapshots, 4), length)
    assert steps(writes) - (length // writes - 1) <= 1.02 * found


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
    assert len(cuts[0].program().start) == len(cuts[0].segments)
    few = bounded(10_000, max_carries=2)  # which runs layers again 50 million times
    program = few.program()
    assert len(program.start) + len(program.held_layers) < 2 * few.length


def test_the_docstring_shows_what_a_program_does():
    lines = [f"    {line}" for line in Execution(shrinking(6).program()).lines]
    assert _schedule.__doc__ and "\n".join(lines) in _schedule.__doc__


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(
    "policy",
    [
        {"nested": True},
        {"nested": 4},
        {"max_carries": 2},
        {"max_carries": 5},
        {"nested": True, "save_carries": "offload"},
        {"nested": 4, "save_carries": "offload"},
        {"nested": 4, "save_carries": "offload", "max_carries": 3},
        {"nested": 2, "save_carries": "offload", "max_carries": 2},
        {"nested": 4, "save_block_internals": ["a"]},
        {"max_carries": 5, "save_block_internals": ["a"]},
    ],
    ids=str,
)
def test_the_program_of_a_policy_finds_every_input(policy, first):
    policy = ScanCheckpointPolicy(**policy, first_layers=first)
    for length in range(first + 2, 40):
        remat = policy.for_layers(length)
        assert remat.schedule is not None
        for saves in (False, True):
            program = remat.schedule.program(saves=saves)
            assert program.layers == range(first, length)
            Execution(program, saves=saves)


def test_the_forward_pass_reads_no_schedule(monkeypatch: pytest.MonkeyPatch):
    def fail(self: Schedule, saves: bool) -> None:
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

    def held(tree: tuple[Tree, ...]) -> int:
        """Inputs of the layers, at the most, while the parts are reversed."""
        return max(
            before + (1 if isinstance(part, int) else held(part))
            for before, part in enumerate(tree)
        )

    for cut in (shrinking(length), bounded(length, max_carries=carries)):
        if cut.length < 50 or carries > 2:
            assert layers(cut.tree) == list(range(length))
            assert held(cut.tree) <= cut.slots
    # The first inputs of segments are off the device, so that each has all slots
    cut = off_device(equal(length, min(carries, length)))
    segments = [part if isinstance(part, tuple) else (part,) for part in cut.tree]
    assert [*map(len, segments)] == [*cut.segments]
    assert not cut.has_two_levels
    if cut.slots > 1:
        assert off_device(cut, cut.slots - 1).has_two_levels
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

    def depth(tree) -> int:
        return 1 + max(map(depth, tree)) if isinstance(tree, tuple) else 0

    # Each doubling of the layers needs a checkpoint more
    depths = []
    for length in range(3, 520):
        try:
            depths.append(depth(_schedule.bounded(length, max_carries=2).tree))
        except ValueError:
            break
    assert max(depths) == 50


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
