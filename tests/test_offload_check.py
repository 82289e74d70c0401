"""`check_offload` passes on a correct device, says what is wrong on others, and runs
once for each device.
"""

import functools

import jax
import numpy as np
import pytest

from stacked_remat import OffloadError, _offload_check, check_offload

gradients = functools.cache(_offload_check._gradients)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    _offload_check._check.cache_clear()
    monkeypatch.setattr(_offload_check, "_gradients", gradients)


def test_it_passes_where_the_compiler_is_right():
    check_offload()


def test_it_checks_the_default_device(monkeypatch):
    checked = []
    monkeypatch.setattr(_offload_check, "_check", checked.append)
    with jax.default_device(jax.devices()[3]):
        check_offload()
    assert checked == [jax.devices()[3]]


def broken(monkeypatch, damage):
    """Counts the runs, and damages those that offload the carries."""
    runs = []

    def damaged(remat):
        runs.append(remat)
        found = gradients(True)
        return (
            damage(found)
            if remat is not True and remat.save_carries == "offload"
            else found
        )

    monkeypatch.setattr(_offload_check, "_gradients", damaged)
    return runs


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda found: found[::-1], "off by"),
        (lambda found: np.full_like(found, np.nan), "off by nan"),
    ],
)
def test_gradients_read_in_the_wrong_order_are_refused(monkeypatch, damage, reason):
    broken(monkeypatch, damage)
    for _ in range(2):  # a failure is not forgotten
        with pytest.raises(OffloadError, match="remat=.nested.") as caught:
            check_offload()
        lines = str(caught.value).splitlines()
        assert [reason in line for line in lines] == [False, True, True, False]
        assert "save_carries='offload'" in lines[1] and "nested=True" in lines[2]


def test_a_program_that_the_compiler_refuses_is_refused(monkeypatch):
    def refuse(found):
        raise jax.errors.JaxRuntimeError("INTERNAL: host offloader\nmore")

    broken(monkeypatch, refuse)
    with pytest.raises(
        OffloadError, match="the compiler refuses it: INTERNAL: host offloader"
    ):
        check_offload()


def test_it_runs_once_for_a_device(monkeypatch):
    runs = broken(monkeypatch, lambda found: found)
    for device in (jax.devices()[0], *jax.devices()[:2]):
        with jax.default_device(device):
            check_offload()
    assert len(runs) == 2 * (1 + len(_offload_check._POLICIES))
