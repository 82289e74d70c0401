"""Defaults are part of the interface: a program without the argument relies on them."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import pytest
from haliax.nn import ScanCheckpointPolicy as HaliaxPolicy
from jax import lax

import stacked_remat as sr
from stacked_remat import diffrax, levanter, streaming

_OF_LOOP = {"remat": False, "reverse": False, "unroll": 1}
_OF_STACK = {"remat": True}
_OF_COSTS = {"costs": (1, 1, 1)}


@pytest.mark.parametrize(
    ("fn", "defaults"),
    [
        (sr.scan, {**_OF_LOOP, "until": None}),
        (sr.fold, {**_OF_LOOP, "until": None}),
        (sr.map, _OF_LOOP),
        (sr.checkpoint, {"save": False, "offload": ()}),
        (sr.fused_update, {"has_aux": False, "max_grad_norm": None}),
        (sr.pipeline, {"schedule": "1f1b", "has_aux": False}),
        (sr.Schedule.timeline, _OF_COSTS),
        (sr.Schedule.span, _OF_COSTS),
        (sr.Schedule.idle, _OF_COSTS),
        (sr.BlockSeq.of, _OF_STACK),
        (sr.Stacked.of, _OF_STACK),
        (sr.StackedPattern.init, _OF_STACK),
        (sr.LayerStack.of, {"axis_name": "layers"}),
        (streaming.init, _OF_STACK),
        (streaming.from_files, {"stacked": 1}),
        (diffrax.RematAdjoint, {"max_carries": 32}),
        (levanter.ArrayStacked.init, {"gradient_checkpointing": False}),
        (levanter.ArrayStacked.vmap_via, {"out_axes": 0}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_defaults(fn: Callable, defaults: dict[str, Any]) -> None:
    parameters = inspect.signature(fn).parameters
    for name, default in defaults.items():
        assert parameters[name].default == default, name


def test_defaults_of_other_libraries() -> None:
    """What takes the place of a function has its defaults."""
    for fn, like in [(sr.lax_scan, lax.scan), (sr.checkpoint, jax.checkpoint)]:
        theirs = inspect.signature(like).parameters
        for name, parameter in inspect.signature(fn).parameters.items():
            if name in theirs:
                assert parameter.default == theirs[name].default, name


def test_policies_without_arguments() -> None:
    """A policy without arguments keeps the carries alone, as Haliax's does, and each
    name of a policy is one of these.
    """
    ours = {field.name: field for field in dataclasses.fields(sr.ScanCheckpointPolicy)}
    for field in dataclasses.fields(HaliaxPolicy):
        if field.default is not dataclasses.MISSING:
            assert ours[field.name].default == field.default, field.name
    default = sr.ScanCheckpointPolicy()
    assert default == sr.ScanCheckpointPolicy(
        save_carries=True, save_block_internals=False, nested=False, first_layers=0
    )
    policies = {
        True: default,
        False: sr.ScanCheckpointPolicy(save_block_internals=True),
        "full": default,
        "recompute": sr.ScanCheckpointPolicy(save_carries=False),
        "offload": sr.ScanCheckpointPolicy(save_carries="offload"),
        "save_all": sr.ScanCheckpointPolicy(save_block_internals=True),
        "nested": sr.ScanCheckpointPolicy(nested=True),
    }
    layer = hax.nn.Linear.init(
        hax.Axis("in", 2), hax.Axis("out", 2), key=jax.random.key(0)
    )
    for remat, policy in policies.items():
        assert sr.Stacked.of([layer], remat=remat).remat == policy
        assert sr.BlockSeq.of([layer], remat=remat).remat == policy
