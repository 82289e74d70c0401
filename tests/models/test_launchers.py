"""MPI and Ray Train start runs by the recipes of a page, and again where a process is
killed.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from stacked_remat.training import ConfigError, processes

from .test_processes import SMALL
from .tiny_run import arguments_of, make_workplace

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "devices.md"
SHORT = (
    *SMALL,
    *("--trainer.num_steps", "28", "--trainer.mesh.axes.data", "-1"),
    *("--trainer.checkpoint.every_steps", "4"),
)
# Of the recipes, which the tests replace.
OPTIONS = "--config_path my-model.yaml --trainer.run_dir /shared/runs/mine"
HOSTS = "num_workers=32, use_gpu=True)"
SECONDS = 400

needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"
)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)


def recipe_of(language, part):
    """The block of a language on the page that has some text."""
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    (found,) = [block for block in blocks if part in block]
    return found


def environment(devices):
    """Of processes with so many devices each; Open MPI refuses root, and more processes
    than cores.
    """
    count = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "RAY_AUTH_MODE": "disabled",
    }


def start(command, folder, devices):
    """A command in a process group of its own, with its output in a file."""
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(devices),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def ended(started, folder):
    """The exit status and the output of a command."""
    try:
        status = started.wait(SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        status = started.wait()
    return status, (folder / "output").read_text(errors="replace")


def processes_below(pid):
    """All processes that this one started, and those that they started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in children]
    for child in map(int, children):
        found += processes_below(child)
    return found


def kill_one(started, folder, run, named):
    """Kills the last process below a command that has these words in its command line,
    once some steps are done.
    """
    metrics = run / "metrics.jsonl"
    until = time.monotonic() + SECONDS
    while not (metrics.exists() and '"step": 6,' in metrics.read_text()):
        assert started.poll() is None, (folder / "output").read_text(errors="replace")
        assert time.monotonic() < until
        time.sleep(0.02)
    workers = []
    for pid in processes_below(started.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        except FileNotFoundError:
            continue
        if named in words:
            workers.append(pid)
    os.kill(max(workers), signal.SIGKILL)


def metrics_of(run):
    """What depends on the numbers of a run, for each step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = {}
    for line in map(json.loads, lines):
        for name in ("loss", "grad_norm", "held_out_loss"):
            if name in line:
                found[line["step"], name] = line[name]
    return found


def mpi_of(workplace, run):
    """The recipe for Open MPI, with two processes."""
    options = shlex.join(arguments_of(workplace, *SHORT, run=run))
    recipe = recipe_of("bash", "mpirun")
    assert OPTIONS in recipe and "-n 32 -N 8" in recipe
    recipe = recipe.replace(OPTIONS, options).replace("-n 32 -N 8", "-n 2")
    return ["bash", "-c", recipe]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run in two processes that nothing ended, by MPI."""
    workplace = make_workplace(tmp_path_factory.mktemp("whole"))
    status, output = ended(start(mpi_of(workplace, "run"), workplace, 2), workplace)
    assert status == 0, output
    return workplace / "run"


@pytest.mark.deep
@needs_mpi
def test_mpi_starts_a_run_again_where_a_process_was_killed(whole, tmp_path):
    workplace = make_workplace(tmp_path)
    started = start(mpi_of(workplace, "run"), workplace, 2)
    kill_one(started, workplace, workplace / "run", "models.train_lm")
    status, output = ended(started, workplace)
    assert status == 0, output
    assert "resuming after step" in output
    assert metrics_of(workplace / "run") == metrics_of(whole)


@pytest.mark.deep
@needs_mpi
def test_a_run_of_two_processes_goes_on_in_one(whole, tmp_path):
    workplace = make_workplace(tmp_path)
    run = workplace / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "28")
    # The config has the paths of the folder that the run was in.
    elsewhere = ("--trainer.checkpoint.accept_changes", "true")
    options = arguments_of(workplace, *SHORT, *elsewhere, run="run")
    alone = [sys.executable, "-m", "models.train_lm", *options]
    status, output = ended(start(alone, workplace, 4), workplace)
    assert status == 0, output
    assert "resuming after step 24" in output
    found, expected = metrics_of(run), metrics_of(whole)
    assert found.keys() == expected.keys()
    values = [found[key] for key in expected], [*expected.values()]
    np.testing.assert_allclose(*values, rtol=2e-4)


@pytest.mark.deep
@needs_mpi
@needs_ray
def test_ray_starts_a_run_again_where_a_worker_was_killed(whole, tmp_path):
    workplace = make_workplace(tmp_path)
    run = workplace / "run"
    recipe = recipe_of("py", "JaxTrainer")
    assert HOSTS in recipe and "import JaxTrainer" in recipe
    # On CPUs alone Ray connects the workers only if it is told so.
    recipe = recipe.replace("import JaxTrainer", "import JaxConfig, JaxTrainer")
    on_cpus = "num_workers=2), jax_config=JaxConfig(use_gpu=True)"
    script = workplace / "ray_train.py"
    script.write_text(
        "import ray\nray.init(num_cpus=4, include_dashboard=False)\n"
        + recipe.replace(HOSTS, on_cpus)
    )
    options = arguments_of(workplace, *SHORT, run="run")
    started = start([sys.executable, str(script), *options], workplace, 2)
    kill_one(started, workplace, run, "ray::RayTrainWorker")
    status, output = ended(started, workplace)
    assert status == 0, output
    assert "resuming after step" in output
    assert metrics_of(run) == metrics_of(whole)


def test_a_process_of_mpi_that_cannot_find_the_others_says_what_to_install(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "4")
            patched.setattr(importlib.util, "find_spec", lambda _: None)
            with pytest.raises(ConfigError, match="one of 4.*pip install mpi4py"):
                processes.start_processes("auto")
            processes.start_processes("off")
    processes.start_processes("auto")  # alone: nothing to connect
