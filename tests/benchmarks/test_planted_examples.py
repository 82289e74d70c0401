"""Tests of benchmarks/planted_examples.py."""

import numpy as np
import pytest

from benchmarks.planted_examples import Found, ranked, train


@pytest.mark.slow
def test_wrong_labels_have_the_lowest_scores(tmp_path, standard_promotion):
    found = ranked(tmp_path, train(tmp_path, examples=3000, steps=300, every=4))
    assert found.wrong.sum() > 200
    assert found.summary["auc"] >= 0.9
    assert found.by_share[0] == 0 and found.by_share[10] > 0.8 and found.by_share[-1] == 1


def test_the_auc_is_the_share_of_pairs_in_order():
    scores, wrong = (
        np.sort(np.random.default_rng(0).random(50))[::-1],
        np.random.default_rng(1).random(50) < 0.3,
    )
    pairs = [high > low for high in scores[~wrong] for low in scores[wrong]]
    assert Found(scores, wrong).summary["auc"] == round(float(np.mean(pairs)), 4)
