"""The losses of a run are drawn in the terminal."""

import json

import pytest

from models.plot import main, read_losses


def write(run, lines):
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.fixture
def run(tmp_path):
    lines = [
        {"step": step, "loss": 9 - step / 50, "grad_norm": 50.0, "z_loss": 70.0} for step in range(1, 401)
    ]
    lines[7]["loss"] = None  # as a loss that is not finite is written
    held_out = [{"step": step, "held_out_loss": 3.0, "held_out/web_loss": 4.0} for step in (0, 400)]
    write(tmp_path / "run", [held_out[0], *lines, held_out[1]])
    return tmp_path / "run"


def test_the_losses_and_nothing_else_are_drawn(run, capsys):
    losses = read_losses(run)
    assert list(losses) == ["loss", "held_out_loss", "held_out/web_loss"]
    assert len(losses["loss"]) == 399 and losses["held_out_loss"] == [(0, 3.0), (400, 3.0)]
    assert main(["--run_dir", str(run)]) == 0
    *plot, axis, names = capsys.readouterr().out.splitlines()
    assert names == "* loss   o held_out_loss   + held_out/web_loss" and max(map(len, plot)) <= 80
    assert axis.split() == ["0", "step", "400"]
    rows = [line.partition("|")[2] for line in plot[:-1]]
    falling = [row for at in range(70) for row, cells in enumerate(rows) if cells[at : at + 1] == "*"]
    assert falling == sorted(falling) and (falling[0], falling[-1]) == (0, len(rows) - 1)
    assert [sum(row.count(mark) for row in rows) for mark in "o+"] == [2, 2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "is not a run folder of models.train_lm"),
        ([{"step": 1, "grad_norm": 2.0}], "has no loss yet"),
        ([{"step": 1, "loss": 2.0}, {"loss": 1.0}], "metrics.jsonl line 2 is not a line of metrics"),
        ([{"step": 1, "loss": [2.0]}], "metrics.jsonl line 1 is not a line of metrics"),
        (["step"], "metrics.jsonl line 1 is not a line of metrics"),
    ],
)
def test_user_errors_are_one_message(tmp_path, lines, message, capsys):
    if lines is not None:
        write(tmp_path / "run", lines)
    assert main(["--run_dir", str(tmp_path / "run")]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("error: ") and message in shown and shown.count("\n") == 1
