"""Tests of benchmarks/planted_examples.py."""

import json

import pytest

from benchmarks.planted_examples import main


@pytest.mark.slow
def test_wrong_labels_have_the_lowest_scores(tmp_path, standard_promotion):
    options = ["--examples", "3000", "--steps", "300", "--every", "4", "--run", str(tmp_path / "run")]
    (found,) = json.loads(main([*options, "--out", str(tmp_path)]).read_text())["rows"]
    assert found["wrong"] > 200 and found["auc"] >= 0.9
    assert found["wrong_among_as_many_lowest"] > 0.8 * found["wrong"]
