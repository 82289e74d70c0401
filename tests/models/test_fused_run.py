"""Training runs with fused updates: the same as those without, with adapters and on several devices too."""

import json

import numpy as np
import pytest

from stacked_remat.training.trainer_config import UpdateConfig

from .tiny_run import make_workplace, train

FEW = ("--trainer.num_steps", "4", "--trainer.log_every", "1")
FUSED = ("--trainer.update.fused", "true")
LORA = ("--lora.rank", "2", "--optimizer.max_grad_norm", "null")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("workplace"))


@pytest.mark.deep
@pytest.mark.parametrize(("options", "devices"), [((), 4), (LORA, 1)], ids=["clipped, on four", "adapters"])
def test_a_run_with_fused_updates_equals_one_without(workplace, options, devices):
    def metrics(*overrides, run):
        run = f"{run}{len(options)}"
        assert train(workplace, *FEW, *options, *overrides, run=run) == 0
        lines = (workplace / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    expected = metrics(run="plain")
    found = metrics(*FUSED, "--trainer.mesh.axes.data", str(devices), run="fused")
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for name in ("loss", "grad_norm", "held_out_loss"):
        values = [[line[name] for line in lines if name in line] for lines in (found, expected)]
        assert len(values[0]) > 1
        np.testing.assert_allclose(*values, rtol=1e-5)


def test_what_needs_the_gradient_of_the_whole_model_is_refused():
    for option in ({"microbatches": 2}, {"on_nonfinite": "skip"}):
        with pytest.raises(ValueError, match="leave it out, or both trainer.update.microbatches"):
            UpdateConfig(fused=True, **option)
