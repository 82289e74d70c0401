"""Tests the commands with runs killed at random moments, faults, and bad inputs.

    python -m benchmarks.faults --kills 60
    python -m benchmarks.faults --kills 10 --streamed

Trains a tiny model with `models.train_lm`; then again, killing the process with SIGKILL at random moments and
restarting the same command until it is finished, and compares every metric and the weights with those of the
uninterrupted run, bit for bit. Then tries the faults and bad inputs of `benchmarks/fault_cases.py`, each of
which must end as stated there. Writes `results/faults.json`, and fails if anything differs.

With `--streamed`, weights and optimizer state of the layers are in host memory and are updated there within
the backward pass, so that a process dies while some layers are updated and others are not: every kill comes
after the process's first step. The cases are left out; writes `results/faults_streamed.json`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stacked_remat._messages import did_you_mean

from .fault_cases import CASES, CONFIG, FUNCTIONS, IMPOSSIBLE, Case
from .record import RESULTS, write_results

REPOSITORY = Path(__file__).parents[1]
STREAMED = ("--trainer.update.fused", "true", "--trainer.streaming", "true")
UNREPEATABLE = {"tokens_per_second", "step_seconds", "peak_memory_bytes"}
_BEFORE_THE_STEPS = 0.25  # share of kills while a process imports, compiles and restores


def main(arguments: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--streamed", action="store_true", help="runs with their layers in host memory")
    parser.add_argument("--only", nargs="*", help="these cases alone, by name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    names = [case.name for case in CASES]
    for name in set(options.only or ()) - set(names):
        parser.error(f"--only: there is no case {name!r}.{did_you_mean(name, names)}")
    only = names if options.only is None else options.only
    wanted = [] if options.streamed else [case for case in CASES if case.name in only]
    with tempfile.TemporaryDirectory() as scratch:
        place = Workplace(Path(scratch), STREAMED if options.streamed else ())
        place.write()
        seconds = _train(place)
        early = 0.0 if options.streamed else _BEFORE_THE_STEPS
        kills = kill_runs(place, options.kills, seconds, random.Random(options.seed), early)
        rows = [try_case(place, case) for case in wanted]
    path = options.out / ("faults_streamed.json" if options.streamed else "faults.json")
    write_results(path, seed=options.seed, **kills, cases=rows)
    print(f"{kills}\nwrote {path}")
    failed = [row["name"] for row in rows if row["passed"] is False]
    if failed or kills["differing"]:
        raise SystemExit(f"failed: {', '.join(failed + kills['differing'])}")
    return path


@dataclass(frozen=True)
class Workplace:
    """A folder with a config, a text and runs, of which `whole` is not interrupted; options of all runs."""

    root: Path
    options: tuple[str, ...] = ()

    def write(self) -> None:
        """Write the config and the text."""
        (self.root / "text").mkdir()
        for number in range(20):
            (self.root / "text" / f"{number}.txt").write_text(f"never odd or even, {number} times. " * 10)
        (self.root / "config.yaml").write_text(CONFIG.replace("ROOT", str(self.root)))

    def training(self, run: Path) -> list[str]:
        """The arguments of `models.train_lm` for a run."""
        return ["--config_path", f"{self.root}/config.yaml", "--trainer.run_dir", str(run), *self.options]

    def begin(self, *command: str, own: Path = REPOSITORY, **streams: Any) -> subprocess.Popen[str]:
        """Start a process, with the names of folders for commands of bash."""
        cache = {"JAX_COMPILATION_CACHE_DIR": f"{self.root}/compiled", "JAX_PLATFORMS": "cpu"}
        less = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1", "PYTHONPATH": f"{REPOSITORY}"}
        names = {"root": f"{self.root}", "own": f"{own}", "python": sys.executable, "LC_ALL": "C.UTF-8"}
        environment = {**os.environ, **cache, **less, **names}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | streams
        return subprocess.Popen(command, cwd=own, env=environment, text=True, **streams)

    def begin_training(self, run: Path, **streams: Any) -> subprocess.Popen[str]:
        """Start a run, or resume it."""
        return self.begin(sys.executable, "-m", "models.train_lm", *self.training(run), **streams)

    def weights(self, run: Path) -> bytes:
        """The weights that a finished run trained, exported."""
        out = f"{run} exported"
        command = (sys.executable, "-m", "models.export_hf", "--run_dir", f"{run}", "--out", out)
        output, _ = self.begin(*command).communicate()
        assert Path(out, "model.safetensors").exists(), output
        return Path(out, "model.safetensors").read_bytes()


def kill_runs(
    place: Workplace, kills: int, seconds: tuple[float, float], draw: random.Random, early_share: float
) -> dict[str, Any]:
    """Kills and restarts runs until this many kills were done and the last run is finished.

    Args:
        place: with the uninterrupted run.
        kills: to do.
        seconds: that a run takes before and after the end of its first step.
        draw: of the moments.
        early_share: of the kills that come before a process's first step.
    """
    found: dict[str, Any] = {"kills": 0, "before_a_step": 0, "runs": 0, "lines": 0, "differing": []}
    if not kills:
        return found
    whole = place.root / "whole"
    expected, weights = metrics(whole), place.weights(whole)
    while found["kills"] < kills:
        found["runs"] += 1
        run = place.root / f"killed{found['runs']}"
        while not (run / "result.json").exists():
            early = draw.random() < early_share
            moment = draw.uniform(0, seconds[0 if early else 1])
            process = place.begin_training(run, stdout=subprocess.DEVNULL)
            if found["kills"] < kills:
                if not early:
                    _await_a_step(process, run)
                _sleep(process, moment)
                process.kill()
            killed = process.wait() == -9
            found["kills"] += killed
            found["before_a_step"] += killed and early
            if not killed and process.returncode != 0:
                return found | {"differing": [f"{run.name}: exit status {process.returncode}"]}
        own = metrics(run)
        found["lines"] += len(own)
        same_result = (run / "result.json").read_text() == (whole / "result.json").read_text()
        if own != expected or not same_result or place.weights(run) != weights:
            found["differing"].append(run.name)
    return found


def try_case(place: Workplace, case: Case) -> dict[str, Any]:
    """Runs one case in a folder of its own."""
    own = place.root / f"case {case.name}"
    own.mkdir()
    process = place.begin(
        "bash", "-c", FUNCTIONS + case.commands, "bash", *place.training(own / "run"), own=own
    )
    text, _ = process.communicate()
    status = None if process.returncode == IMPOSSIBLE else process.returncode
    passed = None if status is None else case.ends_well(status, text)
    print(f"{'?' if passed is None else 'ok' if passed else 'FAILED':7}{case.name}", flush=True)
    if passed is False:
        print(text)
    said = "" if status is None else "".join(text.strip().splitlines()[-1:])
    for path, name in ((own, "CASE"), (place.root, "ROOT"), (REPOSITORY, "REPOSITORY")):
        said = said.replace(f"{path}", name)
    return {"name": case.name, "passed": passed, "status": status, "said": said}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name not in UNREPEATABLE} for line in lines]


def _train(place: Workplace) -> tuple[float, float]:
    """Train without interruption; the seconds before and after the end of the first step."""
    began = time.monotonic()
    process = place.begin_training(place.root / "whole")
    _await_a_step(process, place.root / "whole")
    first_step = time.monotonic()
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"The uninterrupted run failed:\n{output}")
    return first_step - began, time.monotonic() - first_step


def _await_a_step(process: subprocess.Popen, folder: Path) -> None:
    """Waits until this process writes its first line of metrics, or ends."""
    file = folder / "metrics.jsonl"
    began = time.time()
    while process.poll() is None and not (file.exists() and file.stat().st_mtime > began):
        time.sleep(0.01)


def _sleep(process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


if __name__ == "__main__":
    main()
