"""Tests the commands with runs killed at random moments, and with faults.

    python -m benchmarks.faults --kills 60
    python -m benchmarks.faults --kills 10 --streamed

Trains a tiny model with `models.train_lm`; then again, killing the process with SIGKILL
at random moments and restarting the same command until it is finished, and compares
every metric and the weights with those of the uninterrupted run, bit for bit. Then
tries the faults below, each of which must end as stated there. Writes
`results/faults.json`, and fails if anything differs.

With `--streamed`, weights and optimizer state of the layers are in host memory and are
updated there within the backward pass, so that a process dies while some layers are
updated and others are not: every kill comes after the process's first step. The faults
are left out; writes `results/faults_streamed.json`.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .command import Rows, benchmark

REPOSITORY = Path(__file__).parents[1]
STREAMED = ("--trainer.update.fused", "true", "--trainer.streaming", "true")
UNREPEATABLE = {"tokens_per_second", "step_seconds", "goodput", "peak_memory_bytes"}
# Share of kills while a process imports, compiles and restores
_BEFORE_THE_STEPS = 0.25

CONFIG = """
model: {type: qwen3_moe, hidden_dim: 16, num_layers: 2, num_heads: 2, num_kv_heads: 1,
        experts: {num_experts: 2, experts_per_token: 1, intermediate_dim: 8}}
remat: nested
data: {sources: {text: {paths: ["ROOT/text/*.txt"]}}, cache_dir: ROOT/cache,
       held_out_fraction: 0.3, seq_len: 16, batch_size: 4}
optimizer: {learning_rate: 0.02, warmup: 2}
trainer: {num_steps: 150, log_every: 1, eval_every: 40, eval_batches: 2,
          mesh: {axes: {data: 1}}, checkpoint: {every_steps: 5}}
"""
_ARRAYS = "run/checkpoints/{}/state/ocdbt*/d/*"
IMPOSSIBLE = 99
"""The status of a case that this machine or user can't make."""

# $root has the uninterrupted run, in `whole`, its config.yaml, its text and its cache.
# Commands are run in $own, the folder of the case, with the arguments of a run in
# $own/run.
FUNCTIONS = f"""
given=("$@")
command() {{ "$python" -m "models.$1" "${{@:2}}"; }}
train() {{ command train_lm "${{given[@]}}" "$@"; }}
train_in() {{ # in a run folder of its own
    command train_lm --config_path "$root/config.yaml" --trainer.run_dir "$1"
}}
copy() {{
    cp -r "$root/whole" run
    rm run/result.json
    sed -i "s|$root/whole|$own/run|g" run/config.yaml
}}
newest() {{ # damages the newest checkpoint before a command
    flipped '{_ARRAYS.format(150)}'
    command "$1" --run_dir "$own/run" "${{@:2}}"
}}
damaged() {{ # filters a file of the run to resume, which must not change it
    copy
    "${{@:2}}" <"$1" >damaged
    cp damaged "$1"
    train
    local status=$?
    cmp -s damaged "$1" || echo "error: $1 was written to"
    return $status
}}
flipped() {{ # flips a bit of every 256th byte of files of the run
    copy
    "$python" - $1 <<EOF
import pathlib, sys
for path in map(pathlib.Path, sys.argv[1:]):
    content = bytearray(path.read_bytes())
    content[::256] = bytes(byte ^ 1 for byte in content[::256])
    path.write_bytes(content)
EOF
}}
disk() {{
    mount -t tmpfs -o "$1" tmpfs "$own" 2>/dev/null || exit {IMPOSSIBLE}
    trap 'cd / && umount "$own"' EXIT
    cd "$own"
}}
signalled() {{ # sends a signal once a condition holds
    set -m
    {{
        exec "$python" -m models.train_lm "${{given[@]}}" --data.cache_dir "$own/cache"
    }} &
    set +m
    until "${{@:2}}" 2>/dev/null || ! kill -0 $!; do sleep 0.005; done
    kill "-$1" $!
    wait $!
}}
handles_signals() {{ # has its own handler of SIGTERM, set before it imports modules
    [ -e /proc/self/status ] || exit {IMPOSSIBLE}
    ((0x$(sed -n 's/^SigCgt:\\t//p' /proc/$!/status) >> 14 & 1))
}}
tokenizes() {{ [ -e cache ] && sleep "${{1-0}}"; }}
has_done_steps() {{ [ "$(wc -l <run/metrics.jsonl)" -gt 2 ]; }}
"""


class Case(NamedTuple):
    """A fault: commands of bash that cause it and run a command, and how this should
    end.
    """

    name: str
    commands: str
    message: str
    status: int = 1

    def ends_well(self, status: int, output: str) -> bool:
        """Whether the command ended with the status and the message, and no other."""
        one_message = output.count("error: ") == (self.status == 1)
        return (
            status == self.status
            and one_message
            and "Traceback" not in output
            and self.message in output
        )


_CHANGED = "--trainer.checkpoint.accept_changes true --trainer.num_steps 160"
CASES = [
    Case("a run folder that is a file", "echo mine >run; train", "/run: "),
    Case(
        "a run folder below a file",
        f"train_in {__file__}/run",
        "faults.py",
    ),
    Case(
        "a name that is too long",
        "train_in /tmp/$(printf 'x%.0s' {1..300})",
        "too long",
    ),
    Case(
        "no permission",
        f"[ $EUID != 0 ] || exit {IMPOSSIBLE}; chmod 500 .; train",
        "Permission denied",
    ),
    Case("a file system that is read-only", "disk ro; train", "Read-only file system"),
    Case(
        "a full disk, while a checkpoint is written",
        "disk size=600k; train",
        "No space left on device",
    ),
    Case("a limit on the size of files", "ulimit -f 39; train", "File too large"),
    Case(
        "an empty config.yaml in the run",
        "damaged run/config.yaml true",
        "config.yaml is empty",
    ),
    Case(
        "damaged metrics",
        r"damaged run/metrics.jsonl sed '1s/^/\x00\n/'",
        "line 1 is not a line",
    ),
    Case(
        "a flipped byte in the arrays of a checkpoint",
        f"flipped '{_ARRAYS.format('*')}'; train {_CHANGED}",
        "/run/",
    ),
    Case(
        "a damaged token cache",
        'cp -r "$root/cache" cache; printf x | dd of="$(echo cache/*/tokens)" bs=1'
        ' seek=99 conv=notrunc\ntrain --data.cache_dir "$own/cache"',
        "tokens is damaged: bytes",
    ),
    Case(
        "a damaged checkpoint to export",
        'newest export_hf --out "$own/out"',
        "checkpoints/150",
    ),
    Case(
        "a damaged checkpoint to generate from",
        "newest generate --prompt a",
        "checkpoints/150",
    ),
    Case(
        "SIGINT during imports",
        "signalled INT handles_signals",
        "before a step was done",
        75,
    ),
    Case(
        "SIGINT before the first step",
        "signalled INT tokenizes",
        "before a step was done",
        75,
    ),
    Case(
        "SIGTERM before the first step",
        "signalled TERM tokenizes 0.5",
        "by SIGTERM",
        75,
    ),
    Case(
        "SIGINT after the first step",
        "signalled INT has_done_steps",
        "--trainer.run_dir",
        75,
    ),
    Case(
        "SIGTERM after the first step",
        "signalled TERM has_done_steps",
        "--trainer.run_dir",
        75,
    ),
    Case(
        "standard output is closed",
        "train | head -n 1 >/dev/null; status=${PIPESTATUS[0]}\n"
        "[ -e run/result.json ] && echo finished; exit $status",
        "finished",
        0,
    ),
]


@benchmark(lambda streamed, **_: "faults_streamed" if streamed else "faults")
def main(
    kills: int = 60, seed: int = 0, streamed: bool = False, only: str = ""
) -> Rows:
    """What became of killed runs, and of each fault with `only` in its name; `seed`
    draws the moments.

    Raises:
        SystemExit: a run differs, or a command ended otherwise than it should.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = Workplace(Path(scratch), STREAMED if streamed else ())
        place.write()
        seconds = _train(place)
        early = 0.0 if streamed else _BEFORE_THE_STEPS
        found = kill_runs(place, kills, seconds, random.Random(seed), early)
        yield found
        failed = list(found["differing"])
        for case in CASES:
            if only in case.name and not streamed:
                row, text = try_case(place, case)
                yield row
                if row["passed"] is False:
                    print(text)
                    failed.append(case.name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


@dataclass(frozen=True)
class Workplace:
    """A folder with a config, a text and runs, of which `whole` is not interrupted;
    options of all runs.
    """

    root: Path
    options: tuple[str, ...] = ()

    def write(self) -> None:
        """Write the config and the text."""
        (self.root / "text").mkdir()
        for number in range(20):
            (self.root / "text" / f"{number}.txt").write_text(
                f"never odd or even, {number} times. " * 10
            )
        (self.root / "config.yaml").write_text(CONFIG.replace("ROOT", str(self.root)))

    def training(self, run: Path) -> list[str]:
        """The arguments of `models.train_lm` for a run."""
        return [
            "--config_path",
            f"{self.root}/config.yaml",
            "--trainer.run_dir",
            str(run),
            *self.options,
        ]

    def begin(
        self, *command: str, own: Path = REPOSITORY, **streams: Any
    ) -> subprocess.Popen[str]:
        """Start a process, with the names of folders for commands of bash."""
        cache = {
            "JAX_COMPILATION_CACHE_DIR": f"{self.root}/compiled",
            "JAX_PLATFORMS": "cpu",
        }
        less = {
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "PYTHONPATH": f"{REPOSITORY}",
        }
        names = {
            "root": f"{self.root}",
            "own": f"{own}",
            "python": sys.executable,
            "LC_ALL": "C.UTF-8",
        }
        environment = {**os.environ, **cache, **less, **names}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | streams
        return subprocess.Popen(command, cwd=own, env=environment, text=True, **streams)

    def begin_training(self, run: Path, **streams: Any) -> subprocess.Popen[str]:
        """Start a run, or resume it."""
        return self.begin(
            sys.executable, "-m", "models.train_lm", *self.training(run), **streams
        )

    def weights(self, run: Path) -> bytes:
        """The weights that a finished run trained, exported."""
        out = f"{run} exported"
        command = (
            sys.executable,
            "-m",
            "models.export_hf",
            "--run_dir",
            f"{run}",
            "--out",
            out,
        )
        output, _ = self.begin(*command).communicate()
        assert Path(out, "model.safetensors").exists(), output
        return Path(out, "model.safetensors").read_bytes()


def kill_runs(
    place: Workplace,
    kills: int,
    seconds: tuple[float, float],
    draw: random.Random,
    early_share: float,
) -> dict[str, Any]:
    """Kills and restarts runs until this many kills were done and the last run is
    finished.

    Args:
        place: with the uninterrupted run.
        kills: to do.
        seconds: that a run takes before and after the end of its first step.
        draw: of the moments.
        early_share: of the kills that come before a process's first step.
    """
    found: dict[str, Any] = {
        "kills": 0,
        "before_a_step": 0,
        "runs": 0,
        "lines": 0,
        "differing": [],
    }
    if not kills:
        return found
    whole = place.root / "whole"
    expected = metrics(whole)
    weights = place.weights(whole)
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
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(moment)
                process.kill()
            killed = process.wait() == -9
            found["kills"] += killed
            found["before_a_step"] += killed and early
            if not killed and process.returncode != 0:
                return found | {
                    "differing": [f"{run.name}: exit status {process.returncode}"]
                }
        own = metrics(run)
        found["lines"] += len(own)
        same_result = (run / "result.json").read_text() == (
            whole / "result.json"
        ).read_text()
        if own != expected or not same_result or place.weights(run) != weights:
            found["differing"].append(run.name)
    return found


def try_case(place: Workplace, case: Case) -> tuple[dict[str, Any], str]:
    """Runs one case in a folder of its own; its row, and all that it printed."""
    own = place.root / f"case {case.name}"
    own.mkdir()
    process = place.begin(
        "bash",
        "-c",
        FUNCTIONS + case.commands,
        "bash",
        *place.training(own / "run"),
        own=own,
    )
    text, _ = process.communicate()
    status = None if process.returncode == IMPOSSIBLE else process.returncode
    passed = None if status is None else case.ends_well(status, text)
    said = "" if status is None else "".join(text.strip().splitlines()[-1:])
    for path, name in ((own, "CASE"), (place.root, "ROOT"), (REPOSITORY, "REPOSITORY")):
        said = said.replace(f"{path}", name)
    return {"name": case.name, "passed": passed, "status": status, "said": said}, text


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without times and memory."""
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [
        {name: value for name, value in line.items() if name not in UNREPEATABLE}
        for line in lines
    ]


def _train(place: Workplace) -> tuple[float, float]:
    """Train without interruption; the seconds before and after the end of the first
    step.
    """
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
    while process.poll() is None and not (
        file.exists() and file.stat().st_mtime > began
    ):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
