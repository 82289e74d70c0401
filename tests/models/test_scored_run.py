"""Training runs that score their sequences: the same weights as without, and what the log and its command say."""

import json

import numpy as np
import pytest

from stacked_remat.ghost.log import read_scores

from .tiny_run import make_workplace, train

FEW = ("--trainer.num_steps", "6", "--trainer.log_every", "1")


def ghost(**options):
    entries = {"method": "grad_dot", "token_mean": "batch", "every": 2} | options
    return ("--ghost", "{" + ", ".join(f"{name}: {value}" for name, value in entries.items()) + "}")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("workplace"))


def losses_of(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: line.get(name) for name in ("loss", "grad_norm", "held_out_loss", "load_balance")}
        for line in map(json.loads, lines)
    ]


def test_x(workplace):
    assert train(workplace, *FEW, run="plain") == 0
    assert train(workplace, *FEW, *ghost(), run="scored") == 0
    print(losses_of(workplace / "plain"))
    print(losses_of(workplace / "scored"))
    print(
        read_scores(
            workplace / "scored" / "ghost", ["step", "example", "leaf", "layer", "score", "text"]
        ).to_pylist()[:3]
    )
