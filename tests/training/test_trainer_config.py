"""Values of the `trainer` section, and the errors for bad ones."""

import pytest

from stacked_remat.training import (
    CheckpointConfig,
    TrainerConfig,
    UpdateConfig,
)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            TrainerConfig,
            {"run_dir": "https://u:SECRET@h/x"},
            r"^trainer.run_dir = 'https://\*\*\*@h/x' is a URL",
        ),
        (TrainerConfig, {"seed": 2**63}, r"trainer.seed must be at least 0 and below 2..63, got 9223"),
        (UpdateConfig, {"microbatches": 0}, r"trainer.update.microbatches must be at least 1, got 0"),
        (UpdateConfig, {"fused": True, "microbatches": 2}, r"or both trainer.update.microbatches"),
        (UpdateConfig, {"fused": True, "on_nonfinite": "skip"}, r"or both trainer.update.microbatches"),
        (CheckpointConfig, {"keep_last": 0}, r"checkpoint.keep_last must be at least 1"),
    ],
)
def test_values_out_of_range_are_refused(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
