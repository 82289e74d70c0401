"""Two settings of a policy together are refused, or each of them changes the
program.
"""

import functools
import itertools

import equinox as eqx
import haliax as hax
import jax
import pytest

from stacked_remat import BlockSeq, ScanCheckpointPolicy, Stacked, checkpoint_name

from .jaxprs import equations_of, outline

Layers, Hidden = hax.Axis("layers", 8), hax.Axis("hidden", 3)
SETTINGS = [
    ("save_carries", False),
    ("save_carries", "offload"),
    ("save_block_internals", True),
    ("save_block_internals", ("a",)),
    ("offload_block_internals", ("b",)),
    ("nested", True),
    ("nested", 4),
    ("max_carries", 3),
    ("first_layers", 2),
    ("disable", True),
]
PAIRS = [
    dict(pair)
    for pair in itertools.combinations(SETTINGS, 2)
    if pair[0][0] != pair[1][0]
]


class Block(eqx.Module):
    """A block whose backward pass reads the named values and the carry."""

    weight: hax.NamedArray

    def __call__(self, x, shift):
        a = checkpoint_name(hax.sin(x * self.weight), "a")
        return x + checkpoint_name(hax.cos(a * shift), "b") * self.weight


@functools.cache
def program(Stack, policy):
    """The gradient of a fold whose layers take one more input, with the layers' axis
    last.
    """
    weight, shift = hax.ones((Hidden, Layers)), hax.ones((Hidden, Layers))
    layers = Stack.init(Layers, Block, remat=policy)(weight)

    def loss(arguments):
        layers, x, shift = arguments
        return hax.sum(layers.fold(x, shift)).scalar()

    arrays, static = eqx.partition((layers, hax.ones(Hidden), shift), eqx.is_array)
    gradient = jax.grad(lambda arrays: loss(eqx.combine(arrays, static)))
    return outline(equations_of(gradient, arrays))


@pytest.mark.parametrize("settings", PAIRS, ids=str)
def test_two_settings_are_refused_or_respected(settings):
    try:
        policy = ScanCheckpointPolicy(**settings)
    except ValueError as error:
        named = [name for name in settings if name in str(error)]
        assert named == list(settings), f"the reason speaks of {named} alone: {error}"
        return
    for Stack, name in itertools.product((Stacked, BlockSeq), settings):
        keeps_all = settings.get("save_carries") is False or "disable" in settings
        if settings.get("save_block_internals") is True and keeps_all:
            # Haliax writes both: everything is kept, which either of them says.
            continue
        without = ScanCheckpointPolicy(
            **{other: settings[other] for other in settings if other != name}
        )
        changes = program(Stack, policy) != program(Stack, without)
        assert changes, f"{name} has no effect on {Stack.__name__}"
