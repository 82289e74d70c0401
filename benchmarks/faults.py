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
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stacked_remat._messages import did_you_mean

from .fault_cases import CASES, REPOSITORY, Case, Workplace, command
from .record import RESULTS, versions

STREAMED = ("--trainer.update.fused", "true", "--trainer.streaming", "true")
UNREPEATABLE = {"tokens_per_second", "step_seconds", "peak_memory_bytes"}
_BEFORE_THE_STEPS = 0.25  # share of kills while a process imports, compiles and restores


def main(arguments: Sequence[str] | None = None) -> Path:
    parser = _parser()
    options = parser.parse_args(arguments)
    names = [case.name for case in CASES]
    unknown = [name for name in options.only or () if name not in names]
    if unknown:
        parser.error(f"--only: there is no case {unknown[0]!r}.{did_you_mean(unknown[0], names)}")
    wanted = [case for case in CASES if options.only is None or case.name in options.only]
    if options.streamed:
        wanted = []
    with tempfile.TemporaryDirectory() as scratch:
        place = Workplace.make(Path(scratch), *(STREAMED if options.streamed else ()))
        seconds = _train(place, "whole")
        early = 0.0 if options.streamed else _BEFORE_THE_STEPS
        kills = kill_runs(place, options.kills, seconds, random.Random(options.seed), early)
        rows = [try_case(place, case) for case in wanted]
    found = {"versions": versions(), "seed": options.seed, **kills, "cases": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("faults_streamed.json" if options.streamed else "faults.json")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    passed = [row["passed"] for row in rows]
    print(
        f"{kills['kills']} kills of {kills['runs']} runs, {kills['before_a_step']} of them at a start; "
        f"{kills['lines']} lines of metrics, {len(kills['differing'])} differ\n"
        f"{passed.count(True)} of {len(rows)} faults end as they should, {passed.count(None)} can't be tried "
        f"here\n"
        f"wrote {path}"
    )
    failed = [row["name"] for row in rows if row["passed"] is False]
    if failed or kills["differing"]:
        raise SystemExit(f"failed: {', '.join(failed + kills['differing'])}")
    return path


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
    done = before = runs = lines = 0
    differing: list[str] = []
    expected, weights = metrics(place.root / "whole"), place.weights("whole")
    while done < kills:
        runs, run = runs + 1, f"killed{runs}"
        folder = place.root / run
        while not (folder / "result.json").exists():
            early = draw.random() < early_share
            moment = draw.uniform(0, seconds[0 if early else 1])
            unread = {**place.process(), "stdout": subprocess.DEVNULL}
            process = subprocess.Popen(command("train_lm", *place.train(run)), **unread)
            if done < kills:
                if not early:
                    _await_a_step(process, folder)
                _sleep(process, moment)
                process.kill()
            killed = process.wait() == -9
            done, before = done + killed, before + (killed and early)
            if not killed and process.returncode != 0:
                return _kill_counts(done, before, runs, lines, [f"{run}: exit status {process.returncode}"])
        found = metrics(folder)
        lines += len(found)
        same_result = (folder / "result.json").read_text() == (place.root / "whole/result.json").read_text()
        if found != expected or not same_result or place.weights(run) != weights:
            differing.append(run)
    return _kill_counts(done, before, runs, lines, differing)


def try_case(place: Workplace, case: Case) -> dict[str, Any]:
    """Runs one case in a folder of its own."""
    outcome = case.run(place.inside(case.name))
    passed = None if outcome is None else case.ends_well(outcome)
    said = "" if outcome is None else outcome.output.strip().splitlines()[-1:]
    print(f"{'?' if passed is None else 'ok' if passed else 'FAILED':7}{case.name}", flush=True)
    if passed is False and outcome is not None:
        print(outcome.output)
    status = None if outcome is None else outcome.status
    text = "".join(said)
    for path, name in (
        (place.root / f"case {case.name}", "CASE"),
        (place.root, "ROOT"),
        (REPOSITORY, "REPOSITORY"),
    ):
        text = text.replace(f"{path}", name)
    return {"name": case.name, "passed": passed, "status": status, "said": text}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name not in UNREPEATABLE} for line in lines]


def _train(place: Workplace, run: str) -> tuple[float, float]:
    """Trains, and returns the seconds before and after the end of the first step."""
    began = time.monotonic()
    process = subprocess.Popen(command("train_lm", *place.train(run)), **place.process())
    _await_a_step(process, place.root / run)
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


def _kill_counts(kills: int, before: int, runs: int, lines: int, differing: list[str]) -> dict[str, Any]:
    return {"kills": kills, "before_a_step": before, "runs": runs, "lines": lines, "differing": differing}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--streamed", action="store_true", help="runs with their layers in host memory")
    parser.add_argument("--only", nargs="*", help="these cases alone, by name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    main()
