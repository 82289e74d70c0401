"""Fields, contradictions and aliases of policies. What they do is in
test_policies_at_work.py.
"""

import dataclasses
import itertools
import math

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import ScanCheckpointPolicy, ScanCheckpointSpec, Stacked, fold
from stacked_remat._haliax_names import NAMES
from stacked_remat._policy import CUTS, FOLDER_VARIABLE, resolve_policy
from stacked_remat._remat import NOTHING
from stacked_remat._schedule import equal


@pytest.mark.parametrize(
    "alias, policy",
    [
        (True, ScanCheckpointPolicy(save_carries=True)),
        ("full", ScanCheckpointPolicy()),
        (False, ScanCheckpointPolicy(save_block_internals=True)),
        ("recompute", ScanCheckpointPolicy(save_carries=False)),
        ("offload", ScanCheckpointPolicy(save_carries="offload")),
        (
            "save_all",
            ScanCheckpointPolicy(save_carries=True, save_block_internals=True),
        ),
        ("nested", ScanCheckpointPolicy(nested=True)),
    ],
)
def test_aliases(alias, policy):
    assert resolve_policy(alias) == policy
    assert resolve_policy(policy) is policy


def test_policies_are_frozen_hashable_and_compare_by_value():
    policy = ScanCheckpointPolicy(
        save_block_internals=["a", "b"], offload_block_internals=["c"]
    )
    assert policy == ScanCheckpointPolicy(
        save_block_internals=("b", "a", "b"), offload_block_internals=("c",)
    )
    assert len({policy, dataclasses.replace(policy), ScanCheckpointPolicy()}) == 2
    placed = ScanCheckpointPolicy(save_block_internals=["a", "exp 1/1"])
    assert placed.places == ("exp 1/1",)
    assert resolve_policy(False).places == ()
    both = ScanCheckpointPolicy(
        save_block_internals=["exp 1/1", "h"], offload_block_internals=["sin 1/2", "o"]
    )
    assert both.without_places() == ScanCheckpointPolicy(
        save_block_internals=["h"], offload_block_internals=["o"]
    )
    assert resolve_policy(False).without_places() == resolve_policy(False)
    assert len({ScanCheckpointPolicy(nested=True), ScanCheckpointPolicy(nested=1)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.nested = True  # pyright: ignore[reportAttributeAccessIssue]


def test_the_repr_shows_what_was_set():
    assert repr(ScanCheckpointPolicy()) == "ScanCheckpointPolicy()"
    policy = ScanCheckpointPolicy(save_carries="offload", nested=np.int64(4))
    assert repr(policy) == "ScanCheckpointPolicy(save_carries='offload', nested=4)"
    policy = ScanCheckpointPolicy(save_block_internals=["attention"])
    assert repr(policy) == "ScanCheckpointPolicy(save_block_internals=['attention'])"
    assert eval(repr(policy)) == policy


@pytest.mark.parametrize(
    ("remat", "shown"),
    [
        (True, "remat=True"),
        ("nested", "remat='nested'"),
        (
            ScanCheckpointPolicy(max_carries=4),
            "remat=ScanCheckpointPolicy(max_carries=4)",
        ),
    ],
)
def test_a_printed_stack_shows_its_policy_as_it_is_written(remat, shown):
    layers = [eqx.nn.Linear(2, 2, key=jax.random.key(0))] * 3
    assert shown in repr(Stacked.of(layers, remat=remat))


@pytest.mark.parametrize(
    "settings, reason",
    [
        (
            dict(save_block_internals=True, offload_block_internals=["a"]),
            "both save_block_internals=True and off",
        ),
        (
            dict(max_carries=3, save_carries=False),
            "max_carries=3 and save_carries=False",
        ),
        (
            dict(first_layers=2, offload_block_internals=["a"]),
            "first_layers=2 and offload_block_internals",
        ),
        (dict(simple=True, disable=True), "simple=True and disable=True"),
        (
            dict(simple=True, save_block_internals=["a"]),
            r"simple=True and save_block_internals=\['a'\]",
        ),
    ],
)
def test_contradictions_are_refused_with_the_reason(settings, reason):
    """Beside those that docs/errors.md shows, which a test runs."""
    with pytest.raises(ValueError, match=reason):
        ScanCheckpointPolicy(**settings)


@pytest.mark.parametrize(
    "settings, reason",
    [
        (dict(max_carries=True), "max_carries.*an int.*got True"),
        (
            dict(offload_block_internals="attention"),
            r"Write offload_block_internals=\['attention'\]",
        ),
        (
            dict(offload_block_internals=True),
            "offload_block_internals is a list.*got True. Write",
        ),
        (
            dict(save_block_internals=None),
            "save_block_internals is a list.*got None. Write",
        ),
        (
            dict(first_layers=True),
            "first_layers is a number of layers .an int.; got True",
        ),
        (
            dict(save_carries="disk", carries_folder=""),
            "carries_folder is the path of a folder; got ''",
        ),
        (
            dict(save_carries="disk", carries_folder=3),
            "carries_folder is the path of a folder; got 3",
        ),
    ],
)
def test_wrong_types_are_refused(settings, reason):
    with pytest.raises(TypeError, match=reason):
        ScanCheckpointPolicy(**settings)


@pytest.mark.parametrize("number", [np.int64(2), np.array(2), jnp.int32(2)])
@pytest.mark.parametrize("field", ["first_layers", "nested", "max_carries"])
def test_integers_of_every_kind_are_integers(field, number):
    policy = ScanCheckpointPolicy(**{field: number})
    assert type(getattr(policy, field)) is int and policy == ScanCheckpointPolicy(
        **{field: 2}
    )
    assert f"{field}=2" in repr(policy)
    assert ScanCheckpointPolicy(
        nested=2, first_layers=number - 2
    ) == ScanCheckpointPolicy(nested=2)


@pytest.mark.parametrize(
    "cut", [dict(nested=True), dict(nested=3), dict(max_carries=2)]
)
def test_a_single_layer_has_nothing_to_cut(cut):
    policy = ScanCheckpointPolicy(**cut, save_block_internals=["a"])
    plain = ScanCheckpointPolicy(save_block_internals=["a"])
    assert policy.for_layers(1) == plain.for_layers(1)
    assert policy.for_layers(2) != plain.for_layers(2)
    first = ScanCheckpointPolicy(**cut, first_layers=1)
    assert first.for_layers(1) == resolve_policy(False).for_layers(1)


@pytest.mark.parametrize(
    "settings, form, replays",
    [
        ({}, "loop", 0),
        ({"save_carries": "offload"}, "loop", 0),
        ({"save_carries": False}, "loop", 6),
        ({"first_layers": 2}, "sweep", 0),
        ({"first_layers": 6}, "loop", 0),
        # Two segments of three layers, of which the last one runs again too
        ({"nested": 2}, "sweep", 4),
        ({"nested": 2, "first_layers": 2}, "sweep", 2),
        ({"nested": 6}, "sweep", 0),
        # From the first input to layers 4, 3, 2 and 1
        ({"max_carries": 2}, "sweep", 10),
    ],
    ids=str,
)
def test_how_layers_are_executed(settings, form, replays):
    remat = ScanCheckpointPolicy(**settings).for_layers(6)
    assert (remat.form, remat.replays) == (form, replays)
    # A sweep costs the same
    assert remat.carries is None or remat.swept().replays == replays


def test_segments_with_carries_on_the_host_are_the_square_root_of_the_layers():
    policy = ScanCheckpointPolicy(nested=True, save_carries="offload")
    for length in range(1, 30):
        segments = policy.schedule(length).segments
        assert len(segments) == math.ceil(math.sqrt(length))


# For each field values beside its default.
VALUES = {
    "save_carries": ["offload", "disk", False],
    "save_block_internals": [True, ("a",), jax.checkpoint_policies.dots_saveable],
    "offload_block_internals": [("a",)],
    "nested": [True, 1, 2, 3],
    "max_carries": [2, 3],
    "first_layers": [1, 5],
}
# Those of Haliax are in test_fields_of_haliax_mean_what_other_settings_say.
FIELDS = {field.name for field in dataclasses.fields(ScanCheckpointPolicy)} - NAMES


def executed(policy, length):
    """What a policy executes, with a program instead of the schedule."""
    remat = policy.for_layers(length)
    if remat.schedule is None:
        return remat
    program = remat.schedule.program(saves=remat.kept != NOTHING)
    return dataclasses.replace(remat, schedule=None), program


def test_each_value_of_each_field_changes_what_is_executed(monkeypatch):
    # A folder has an effect beside "disk" alone: `test_carries_on_disk.py`.
    assert set(VALUES) == FIELDS - {"carries_folder"} and set(CUTS) <= FIELDS
    monkeypatch.setenv(FOLDER_VARIABLE, "folder")
    found = [executed(ScanCheckpointPolicy(), 8)]
    for name, values in VALUES.items():
        for value in values:
            found.append(executed(ScanCheckpointPolicy(**{name: value}), 8))
    for one, other in itertools.combinations(found, 2):
        assert one != other


@pytest.mark.parametrize("name", CUTS)
def test_a_field_that_cuts_does_so_and_contradicts_what_has_other_cuts(name):
    value = VALUES[name][-1]
    policy = ScanCheckpointPolicy(**{name: value})
    assert policy.has_cut
    assert policy.for_layers(8).schedule == policy.schedule(8) != equal(8, 8)
    others = {cut: VALUES[cut][-1] for cut in CUTS if cut != name}
    others |= {"save_carries": False, "offload_block_internals": ["a"]}
    for other, other_value in others.items():
        with pytest.raises(ValueError, match="contradict each other"):
            ScanCheckpointPolicy(**{name: value, other: other_value})


def test_errors_name_all_fields_that_cut():
    Layers, weights = hax.Axis("layers", 4), jnp.ones(4)

    def step(x, w):
        return x * w

    ref = jax.new_ref(jnp.ones(()))
    stack = Stacked.of([eqx.nn.LayerNorm(2)] * 4)
    calls = [
        lambda: fold(step, Layers, remat="offload", until=jnp.any)(1.0, weights),
        lambda: stack.fold_vjp(jnp.ones(2), remat="recompute"),
        lambda: fold(lambda x, w: x * ref[...], Layers, remat="nested")(1.0, weights),
        lambda: ScanCheckpointPolicy(first_layers=1, save_block_internals=["a"]),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert all(name in str(error.value) for name in CUTS)


def test_haliax_policies_are_taken_as_the_same_here():
    of_haliax = hax.nn.ScanCheckpointPolicy
    for alias in (True, False, "offload", "recompute", "save_all", "nested"):
        assert resolve_policy(of_haliax.from_bool_or_str(alias)) == resolve_policy(
            alias
        )
    written = of_haliax(nested=3, save_block_internals=["b", "a"])
    assert resolve_policy(written) == ScanCheckpointPolicy(
        nested=3, save_block_internals=["a", "b"]
    )
    for settings in (dict(simple=True, nested=2), dict(disable=True, nested=2)):
        same = ScanCheckpointPolicy(**settings)
        assert resolve_policy(of_haliax(**settings)) == same
    # There `simple` and `disable` win over what contradicts them here.
    simple = of_haliax(simple=True, save_block_internals=["a"], save_inputs="offload")
    assert resolve_policy(simple) == ScanCheckpointPolicy()
    with pytest.raises(ValueError, match="streaming.to_host"):
        resolve_policy(of_haliax(save_inputs="offload"))


@pytest.mark.parametrize(
    "written, meant",
    [
        (dict(save_inputs=True, prevent_cse=True, simple=True), {}),
        (dict(simple=True, nested=2), dict(nested=2)),
        (dict(disable=True), dict(save_block_internals=True)),
        (
            dict(disable=True, max_carries=3),
            dict(save_block_internals=True, max_carries=3),
        ),
        (
            dict(disable=True, save_block_internals=True, save_inputs=True),
            dict(save_block_internals=True),
        ),
    ],
    ids=str,
)
def test_fields_of_haliax_mean_what_other_settings_say(written, meant):
    policy, same = ScanCheckpointPolicy(**written), ScanCheckpointPolicy(**meant)
    assert all(getattr(policy, name) == value for name, value in written.items())
    assert policy == same and hash(policy) == hash(same) and repr(policy) == repr(same)
    assert policy.for_layers(6) == same.for_layers(6)
    replaced = dataclasses.replace(resolve_policy(policy), save_block_internals=False)
    assert not replaced.saves_everything


@pytest.mark.parametrize("alias", [True, False, "nested", "offload"])
def test_from_bool_or_str_is_what_remat_takes(alias):
    policy = ScanCheckpointPolicy.from_bool_or_str(alias)
    assert policy == resolve_policy(alias) == ScanCheckpointPolicy._mk(policy)


@dataclasses.dataclass(frozen=True)
class _Config:
    remat: bool | ScanCheckpointPolicy | str = True
    spec: ScanCheckpointSpec = True


@pytest.mark.parametrize(
    "entry",
    [
        {"nested": 4},
        {"save_block_internals": ["a"]},
        {"save_carries": "offload"},
        {"simple": True, "nested": 2},
        {"save_inputs": True, "disable": True},
    ],
)
def test_draccus_decodes_and_encodes_a_policy(entry):
    draccus = pytest.importorskip("draccus")
    config = draccus.decode(_Config, {"remat": entry, "spec": entry})
    assert config.remat == config.spec == ScanCheckpointPolicy(**entry)
    assert draccus.decode(_Config, draccus.encode(config)) == config
    for alias in (False, "nested"):
        assert draccus.decode(_Config, {"spec": alias}).spec == alias
