"""The `remat` config entry to a policy, and back."""

import pytest
import yaml

from stacked_remat import ScanCheckpointPolicy
from stacked_remat._policy import resolve_policy
from stacked_remat.training import check_remat, remat_policy
from stacked_remat.training.remat import remat_entry, remat_lines

PRESETS = {
    "frugal": ScanCheckpointPolicy(nested=3),
    "kept": ScanCheckpointPolicy(save_block_internals=["a"]),
}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"nestd": 3}, r"remat.nestd is not a field.* Did you mean `nested`"),
        ("2020-01-01", "remat"),
        (5, "remat"),
        ({"nested": "x"}, "remat"),
        ("nesed", r"Unknown remat policy 'nesed'.*Did you mean `nested`"),
        ("nested=3", r"Settings are a mapping: remat: \{max_carries: 8\}"),
        (
            "frugl",
            r"'frugl'.*Presets of this model: frugal, kept.*Did you mean `frugal`",
        ),
    ],
)
def test_other_entries_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        remat_policy(value, PRESETS)


@pytest.mark.parametrize(
    "policy",
    [
        *(True, False, "nested", ScanCheckpointPolicy()),
        ScanCheckpointPolicy(nested=3, save_block_internals=["a", "b"]),
        ScanCheckpointPolicy(nested=True, save_carries="offload", first_layers=3),
    ],
    ids=str,
)
def test_the_entry_of_a_policy_is_an_alias_or_fields_and_is_read_back(policy):
    lines = yaml.safe_load(remat_lines(policy, streamed=True))
    entry = lines["remat"]
    assert lines == {"remat": remat_entry(policy), "trainer": {"streaming": True}}
    assert remat_policy(entry) == resolve_policy(policy)
    assert entry == policy or isinstance(policy, ScanCheckpointPolicy)


@pytest.mark.parametrize(
    ("remat", "budget", "host_budget", "message"),
    [
        ("auto", None, None, "budget: 72GiB"),
        ("auto", "lots", None, "^budget: cannot read 'lots' as a number of bytes"),
        ("auto", "72GiB", "some", "^host_budget: cannot read 'some'"),
        ("nested", "72GiB", None, "budget = 72GiB has no effect beside remat: nested"),
        ("nestd", "72GiB", None, "Did you mean `nested`"),
        (True, None, "1TiB", "host_budget = 1TiB has no effect"),
        ({"save_carries": "disk"}, None, None, "Give one as carries_folder"),
    ],
)
def test_a_budget_goes_with_auto_and_nothing_else(remat, budget, host_budget, message):
    with pytest.raises(ValueError, match=message):
        check_remat(remat, budget, host_budget)
    assert check_remat("auto", "72GiB", "1.5TiB") is None


def test_a_preset_is_named_like_an_alias():
    assert remat_policy("frugal", PRESETS) == PRESETS["frugal"]
    assert check_remat("frugal", None, None, PRESETS) == PRESETS["frugal"]
    assert remat_policy("nested", PRESETS) == ScanCheckpointPolicy(nested=True)
    fields = {"nested": 3, "save_block_internals": ["a"]}
    assert remat_policy(fields) == ScanCheckpointPolicy(**fields)
