"""A run with parameters that are frozen and learning rates by pattern: it is stopped,
resumed and read.
"""

import jax
import numpy as np
import pytest

from models.run_config import find_model
from models.run_state import Placement
from stacked_remat.training import parameter_paths

from .tiny_run import make_workplace, train

PATTERNS = (
    "--freeze",
    '["*router*"]',
    "--optimizer.learning_rates",
    '{"*norm*": 0.5}',
    "--optimizer.warmup",
    "0",
    "--trainer.num_steps",
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = make_workplace(tmp_path_factory.mktemp("frozen"))
    assert train(folder, *PATTERNS, "2") == 0
    return folder


def parameters(workplace, step):
    found = find_model(str(workplace / "run"), step)
    model = Placement.of(found.run).read_model(found, "float32")
    arrays = map(np.asarray, jax.tree.leaves(model))
    return dict(zip(parameter_paths(model), arrays, strict=True))


def test_a_resumed_run_has_the_same_frozen_parameters(workplace):
    accept = ("--trainer.checkpoint.accept_changes", "true")
    assert train(workplace, *PATTERNS, "3", *accept) == 0
    before, after = parameters(workplace, 2), parameters(workplace, 3)
    routers = [path for path in before if "router" in path]
    assert routers
    for path, array in before.items():
        assert np.array_equal(array, after[path]) == (path in routers), path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--freeze", "[]"], "freeze"),
        (["--optimizer.learning_rates", "{}"], "learning_rates"),
        (
            ["--freeze", "[]", "--trainer.checkpoint.accept_changes", "true"],
            "checkpoint",
        ),
        (
            ["--freeze", '["*rooter*"]', "--trainer.run_dir", "{new}"],
            "freeze: '*rooter*' matches no parameter that is trained. Nearest of",
        ),
        (
            ["--freeze", '["*"]', "--trainer.run_dir", "{new}"],
            "freeze: the patterns match every parameter that would be trained.",
        ),
        (
            [
                "--freeze",
                '["layers.*"]',
                "--trainer.update.fused",
                "true",
                "--optimizer.learning_rates",
                "{}",
                "--trainer.run_dir",
                "{new}",
            ],
            "freeze: the patterns match every parameter of the layers, and trainer.upd",
        ),
        (
            [
                "--optimizer.learning_rates",
                '{"embed": 0.1}',
                "--trainer.run_dir",
                "{new}",
            ],
            "optimizer.learning_rates: 'embed' matches no parameter that is trained",
        ),
    ],
)
def test_other_patterns_are_refused(workplace, changes, message, tmp_path, capsys):
    changes = [change.replace("{new}", str(tmp_path / "new")) for change in changes]
    assert train(workplace, *PATTERNS, "2", *changes) == 1
    output = capsys.readouterr()
    assert message in " ".join((output.out + output.err).split())
