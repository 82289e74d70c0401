"""Tests of the benchmark of checkpointed chains, and of what it recorded."""

import pytest

from benchmarks.checkpoint_chain import measure, variants
from benchmarks.residual_mlp import Sizes
from tests.recorded_on import ON_H200, ON_V5P


@pytest.mark.parametrize("target", [ON_H200, ON_V5P])
def test_recomputation_survives_compilation(target):
    """As `tests/test_checkpoint.py` shows for CPUs."""
    chosen = (
        "nothing",
        "checkpoint(layer)",
        "BlockSeq, nested",
        "checkpoint(layer, save=dots_saveable)",
    )
    sizes = Sizes(6, 4_096, 512, 2_048)
    found = {
        name: measure(run, sizes, target) for name, run in variants(6) if name in chosen
    }
    # A layer has 2 products and its gradient 4. Of its recomputation the second is not
    # needed.
    assert found["nothing"]["products"] == 6 * 6
    assert found["checkpoint(layer)"]["products"] == 7 * 6
    assert (
        found["checkpoint(layer)"]["temporaries"]
        < 0.5 * found["nothing"]["temporaries"]
    )
    assert found["BlockSeq, nested"]["products"] > 7 * 6
    assert found["checkpoint(layer, save=dots_saveable)"]["products"] == 6 * 6
