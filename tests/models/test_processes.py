"""Runs in several processes: they equal one process, stop together, and resume in any
number.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import models.train_lm as train_lm
from models.candidate import Candidate
from models.run_config import LmRunConfig
from models.train_lm import _trackers, main
from stacked_remat.ghost.log import read_scores
from stacked_remat.training import (
    EXIT_INTERRUPTED,
    ConfigError,
    ConsoleProgress,
    RunFolder,
    processes,
)
from stacked_remat.training.processes import start_processes

from .tiny_run import arguments_of, make_workplace

ROOT = Path(__file__).parents[2]
DEVICES = 4
HEARTBEAT = 20
SHORT = (
    *("--trainer.num_steps", "12", "--trainer.mesh.axes.data", "-1"),
    *("--trainer.checkpoint.every_steps", "4"),
)

COLUMNS = ["step", "example", "layer", "leaf", "score", "loss", "text", "place"]
COLUMNS += ["token_scores", "token_ends"]
DENSE = {"type": "qwen3", "hidden_dim": 8, "num_layers": 1, "mlp_dim": 8}
DENSE |= {"num_heads": 2, "num_kv_heads": 1}
# Where a run is only ended and resumed
SMALL = ("--model", json.dumps(DENSE))
CONSTANT = ("--optimizer.schedule.type", "constant")  # whatever the number of steps


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start(
    workplace, processes, *overrides, run="run", last=(), env=None, last_env=None
):
    """The processes of a run; `last` is for the last one only."""
    arguments = arguments_of(workplace, *SHORT, *overrides, run=run)
    own = arguments_of(workplace, *SHORT, *overrides, *last, run=run)
    each = [arguments] * (processes - 1) + [own]
    return started("models.train_lm", each, env, last_env)


def started(module, of_processes, env=None, last_env=None):
    """Processes that run a module with these arguments, and have four devices
    together.
    """
    port, found, count = free_port(), [], len(of_processes)
    for index, arguments in enumerate(of_processes):
        together = {
            "coordinator_address": f"localhost:{port}",
            "num_processes": count,
            "process_id": index,
            "local_device_ids": None,
            "heartbeat_timeout_seconds": HEARTBEAT,
        }
        distributed = json.dumps(together) if count > 1 else "off"
        devices = f"--xla_force_host_platform_device_count={DEVICES // count}"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}",
            **(env or {}),
            **((last_env or {}) if index == count - 1 else {}),
        }
        call = ("-u", "-m", module, *arguments)
        found.append(python(*call, "--distributed", distributed, env=environment))
    return found


def python(*arguments, env=None):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, **options)


def ended(started):
    """The exit status and the output of each process."""
    shown = [process.communicate(timeout=300)[0] for process in started]
    return [process.returncode for process in started], shown


def metrics_of(folder):
    lines = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    names = ("loss", "grad_norm", "held_out_loss")
    found = [
        ((line["step"], name), line[name])
        for line in lines
        for name in names
        if name in line
    ]
    assert len(dict(found)) == len(found)  # one process writes
    return dict(found)


def checkpoints_of(folder):
    """The folders of a run's checkpoints, from the first to the last step."""
    paths = [path for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]
    return sorted(paths, key=lambda path: int(path.name))


def wait_for(path, text, started):
    until = time.monotonic() + 200
    while not (path.exists() and text in path.read_text()):
        assert (
            all(process.poll() is None for process in started)
            and time.monotonic() < until
        ), ended(started)
        time.sleep(0.02)


def assert_same_run(folder, expected):
    found, expected = metrics_of(folder), metrics_of(expected)
    assert found.keys() == expected.keys()
    values = [found[key] for key in expected], [*expected.values()]
    np.testing.assert_allclose(*values, rtol=2e-4)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """With a run of one process."""
    folder = make_workplace(tmp_path_factory.mktemp("processes"))
    status, shown = ended(start(folder, 1, run="one"))
    assert status == [0], shown
    return folder


@pytest.mark.deep
def test_a_killed_process_ends_the_others_and_any_number_resumes(workplace):
    started = start(workplace, 2, *SMALL, "--trainer.num_steps", "4000")
    wait_for(workplace / "run/metrics.jsonl", '"step": 13,', started)
    started[1].kill()
    killed = time.monotonic()
    (status, _), (shown, _) = ended(started)
    assert status in (
        EXIT_INTERRUPTED,
        -signal.SIGABRT,
    ), shown  # by whichever notices first
    assert time.monotonic() - killed < HEARTBEAT + 30
    last, deleted = checkpoints_of(workplace / "run")[-2:]
    last = int(last.name)
    shutil.rmtree(deleted)
    # Four processes go back to the one before the last, and one of them is told to
    # stop, after steps that the two had not done.
    accept = ("--trainer.checkpoint.accept_changes", "true", "--trainer.num_steps")
    accept = (*SMALL, *accept)
    started = start(workplace, 4, *accept, "4001")
    wait_for(workplace / "run/metrics.jsonl", f'"step": {last + 20},', started)
    started[2].terminate()
    status, shown = ended(started)
    done = int(checkpoints_of(workplace / "run")[-1].name)
    assert (
        status == [EXIT_INTERRUPTED] * 4
        and f"stopped by SIGTERM after step {done}" in shown[0]
    )
    assert f"resuming after step {last}" in shown[0] and "resuming" not in "".join(
        shown[1:]
    )
    # One process ends it.
    status, shown = ended(start(workplace, 1, *accept, str(done + 2)))
    assert status == [0], shown
    steps = [step for step, name in metrics_of(workplace / "run") if name == "loss"]
    assert steps == list(range(1, done + 3))


@pytest.mark.deep
def test_processes_resume_from_what_each_wrote_near_it(workplace, tmp_path):
    near = (
        *SMALL,
        *("--trainer.checkpoint.local_dir", str(tmp_path / "near")),
        *("--trainer.checkpoint.every_steps", "1000"),
        *CONSTANT,
    )
    long = ("--trainer.num_steps", "4000")
    started = start(workplace, 2, *near, *long, run="near")
    wait_for(workplace / "near/metrics.jsonl", '"step": 7,', started)
    for process in started:
        process.kill()
    ended(started)
    done = max(step for step, _ in metrics_of(workplace / "near"))
    assert not checkpoints_of(workplace / "near")
    accept = ("--trainer.checkpoint.accept_changes", "true", "--trainer.num_steps")
    status, shown = ended(
        start(workplace, 2, *near, *accept, str(done + 3), run="near")
    )
    assert status == [0, 0], shown
    resumed = int(re.search(r"resuming after step (\d+)", shown[0])[1])
    assert done - 2 <= resumed <= done, shown[0]
    steps = [step for step, name in metrics_of(workplace / "near") if name == "loss"]
    assert steps == list(range(1, done + 4))
    assert [*(tmp_path / "near").iterdir()] == []
    # One process with as many devices equals it.
    fresh = ("--trainer.checkpoint.overwrite", "true", "--trainer.num_steps")
    status, shown = ended(
        start(workplace, 1, *SMALL, *CONSTANT, *fresh, str(done + 3), run="near whole")
    )
    assert status == [0], shown
    assert_same_run(workplace / "near", workplace / "near whole")


def ended_together(count, program):
    """The exit status and the output of processes that run a program once they are
    connected.
    """
    begin = f"""
import sys, time
from stacked_remat.training import ConfigError, processes
index = int(sys.argv[1])
address = "localhost:{free_port()}"
together = dict(
    coordinator_address=address, num_processes={count}, process_id=index
)
processes.start_processes(together)
"""
    return ended([python("-c", begin + program, str(index)) for index in range(count)])


@pytest.mark.deep
def test_processes_wait_for_a_late_one_as_long_as_they_say():
    program = """
processes._HOURS_TO_WAIT = 2 / 3600
processes.jax.devices()
if index == 1: time.sleep(200)
try:
    processes.agreed(int)
except Exception as error:
    print(error)
    processes.end_process(1)
"""
    status, shown = ended_together(2, program)
    assert status == [1, -signal.SIGABRT], shown
    assert "the processes of this run did not all arrive within" in shown[0]


@pytest.mark.deep
def test_a_mistake_of_the_first_process_ends_all_with_status_1():
    """Whether the first process would end too early, which ends the others in another
    way.
    """
    program = """
def work():
    raise ConfigError("a mistake")
try:
    processes.in_turn(work)
except ConfigError as error:
    time.sleep(2 * index)
    print(error)
    processes.end_after_error(1)
"""
    status, shown = ended_together(3, program)
    assert status == [1, 1, 1], shown
    for output, message in zip(
        shown, ("a mistake", *["process 0 of this run failed"] * 2), strict=True
    ):
        assert message in output


def test_a_process_that_waits_for_others_handles_signals(monkeypatch):
    def interrupt(number, frame):
        raise InterruptedError

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "exchange", lambda *_: time.sleep(60))
    handler, began = signal.signal(signal.SIGTERM, interrupt), time.monotonic()
    threading.Timer(
        0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM)
    ).start()
    with pytest.raises(InterruptedError):
        processes.agreed(int)
    signal.signal(signal.SIGTERM, handler)
    assert time.monotonic() - began < 30


def test_configs_are_compared_again_with_the_policies_that_auto_found(monkeypatch):
    compared, found = [], LmRunConfig(remat="nested")
    monkeypatch.setattr(
        train_lm,
        "check_same_in_all",
        lambda config, fix: compared.append(config["remat"]),
    )
    monkeypatch.setattr(train_lm, "_prepared", lambda *_: (Candidate(found), None))
    train_lm._prepared_in_all(
        LmRunConfig(remat="auto", budget="1GiB"), ConsoleProgress()
    )
    assert compared == ["auto", "nested"]


@pytest.mark.deep
def test_processes_that_divide_rows_and_weights_train_as_one(workplace):
    mesh = (
        "{axes: {data: 2, model: 2}, compute_mapping: {batch: data}, param_mapping:"
        " {expert_dim: model}}"
    )
    status, shown = ended(start(workplace, 4, "--trainer.mesh", mesh, run="mesh"))
    assert status == [0] * 4, shown
    assert_same_run(workplace / "mesh", workplace / "one")
    assert "held-out loss after 12 steps" in shown[0] and "step" not in "".join(
        shown[1:]
    )


def assert_same_scores(folder, expected):
    found, wanted = (
        read_scores(one, COLUMNS).to_pydict() for one in (folder, expected)
    )
    for name, values in wanted.items():
        if name in ("score", "loss"):
            np.testing.assert_allclose(found[name], values, rtol=2e-3, atol=1e-6)
        elif name == "token_scores":
            for own, other in zip(found[name], values, strict=True):
                if other is not None:
                    np.testing.assert_allclose(own, other, rtol=5e-3, atol=1e-5)
        else:
            assert found[name] == values, name
    return wanted


@pytest.mark.deep
def test_processes_score_their_sequences_in_one_log(workplace):
    scored = (*SMALL, "--ghost", "{every: 6, validation: {batches: 2}}")
    for count, run in ((1, "scored whole"), (2, "scored")):
        status, shown = ended(start(workplace, count, *scored, run=run))
        assert status == [0] * count, shown
    run, whole = workplace / "scored", workplace / "scored whole"
    assert_same_run(run, whole)
    wanted = assert_same_scores(run / "ghost", whole / "ghost")
    assert set(wanted["step"]) == {6, 12}


@pytest.mark.deep
def test_processes_replay_what_they_scored_by_token(workplace):
    few = (*SMALL, "--remat", "false", "--trainer.num_steps", "4")
    few += ("--trainer.checkpoint.every_steps", "2")
    by_token = ("--ghost", "{every: 4, by_token: true}")
    status, shown = ended(start(workplace, 2, *few, *by_token, run="replayed"))
    assert status == [0, 0], shown
    run = workplace / "replayed"
    replay = ["--run_dir", str(run), "--by_token", "--least_metasmoothness", "-1"]
    for each in ([[*replay, "--one_device"]], [replay] * 2):
        status, shown = ended(started("models.replay_lm", each))
        assert status == [0] * len(each), shown
        assert "replayed steps 3 to 4" in shown[0], shown
        assert "replayed" not in "".join(shown[1:]), shown
        if len(each) == 1:
            (run / "replay").rename(run / "on one device")
    wanted = assert_same_scores(run / "replay", run / "on one device")
    totals = [sum(scores) for scores in wanted["token_scores"]]
    np.testing.assert_allclose(totals, wanted["score"], rtol=1e-3, atol=1e-5)
    assert np.abs(totals).max() > 1e-3
    scored = read_scores(run / "ghost", COLUMNS).to_pydict()
    last = [at for at, step in enumerate(wanted["step"]) if step == 4]
    for name in ("example", "text", "place", "token_ends"):
        assert scored[name] == [wanted[name][at] for at in last], name


@pytest.mark.deep
def test_a_mistake_in_one_process_ends_all_with_status_1_before_the_first_step(
    workplace,
):
    mesh, tokenizer = ("--trainer.mesh.axes.x", "2"), ("--data.tokenizer", "nowhere")
    last = (*mesh, *tokenizer, "--trainer.checkpoint.keep_last", "5")
    status, shown = ended(start(workplace, 2, run="mistaken", last=last))
    assert status == [1, 1], shown
    for output in shown:
        assert "error: the processes of this run have different configs:\n" in output, (
            output
        )
        for line in (
            "data.tokenizer is None in process 0 and nowhere in process 1",
            "trainer.checkpoint.keep_last is 2 in process 0 and 5 in process 1",
            "trainer.mesh.axes.x is not set in process 0 and 2 in process 1",
        ):
            assert f"\n  {line}\n" in output, output
    # The second process does not find the text. Its path has a word that is in errors
    # of lost processes.
    (workplace / "gloo").symlink_to(workplace / "text")
    text, homeless = (
        ("--data.sources.text.paths", "[~/gloo/*.txt]"),
        {"HOME": str(workplace / "text")},
    )
    started = start(
        workplace,
        2,
        *text,
        run="mistaken",
        env={"HOME": str(workplace)},
        last_env=homeless,
    )
    status, (first, second) = ended(started)
    assert status == [1, 1], (first, second)
    assert "error: process 1 of this run failed; its output says why." in first
    assert (
        "error: " in second
        and "'~/gloo/*.txt' in data.sources.text.paths matches no file" in second
    )
    elsewhere = ("--trainer.run_dir", str(workplace / "elsewhere"))
    status, (first, second) = ended(start(workplace, 2, run="mistaken", last=elsewhere))
    assert status == [1, 1] and "error: process 1 of this run failed" in first, (
        first,
        second,
    )
    assert "process 1 does not see the run folder that process 0 made" in second
    assert f"{workplace / 'elsewhere'}. All processes must see one folder" in second


@pytest.mark.deep
def test_a_process_that_waits_for_the_others_ends_by_a_signal_and_in_time(tmp_path):
    workplace, ports = make_workplace(tmp_path), (free_port(), free_port())
    started = []
    for index, seconds in ((0, 60), (1, 2)):
        together = {
            "coordinator_address": f"localhost:{ports[index]}",
            "num_processes": 2,
        }
        together |= {"process_id": index, "initialization_timeout": seconds}
        started.append(
            python(
                "-m",
                "models.train_lm",
                *arguments_of(workplace, "--distributed", json.dumps(together)),
            )
        )
    while True:  # until the first process listens
        with socket.socket() as tried:
            if tried.connect_ex(("localhost", ports[0])) == 0:
                break
        assert started[0].poll() is None
        time.sleep(0.02)
    started[0].terminate()
    status, (signalled, _) = ended(started)
    assert (
        status == [EXIT_INTERRUPTED, -signal.SIGABRT]
        and "before a step was done" in signalled
    )


def test_only_the_first_process_opens_trackers(tmp_path, monkeypatch):
    """Several on one file may leave the lines of one, which no run shows."""
    for index in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        with contextlib.ExitStack() as closing:
            opened = _trackers(LmRunConfig(), RunFolder(tmp_path), None, closing)
        assert len(opened) == len([*tmp_path.iterdir()]) == (index == 0)


def test_mistakes_are_named(tmp_path, capsys):
    workplace = make_workplace(tmp_path)
    assert main(arguments_of(workplace, "--distributed", "on")) == 1
    assert "distributed: JAX can't connect the processes" in capsys.readouterr().out
    start_processes(LmRunConfig().distributed)  # no cluster here: nothing to connect
    for wrong in (
        {"coordinator": "localhost:1"},
        {"coordinator_address": "localhost", "process_id": 1},
        {"coordinator_address": "localhost:1", "num_processes": 1, "process_id": 2},
    ):
        with pytest.raises(
            ConfigError, match="distributed: JAX can't connect.*Set distributed: off"
        ):
            start_processes(wrong)
