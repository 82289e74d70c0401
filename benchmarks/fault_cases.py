"""The faults and bad inputs of `benchmarks.faults`, and how the commands should end."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

_CONFIG = """
model: {type: qwen3_moe, hidden_dim: 16, num_layers: 2, num_heads: 2, num_kv_heads: 1,
        experts: {num_experts: 2, experts_per_token: 1, intermediate_dim: 8}}
remat: nested
data: {held_out_fraction: 0.3, seq_len: 16, batch_size: 4}
optimizer: {learning_rate: 0.02, warmup: 2}
trainer: {num_steps: 150, log_every: 1, eval_every: 40, eval_batches: 2, mesh: {axes: {data: 1}},
          checkpoint: {every_steps: 5}}
"""
REPOSITORY = Path(__file__).parents[1]


def command(name: str, *arguments: str) -> list[str]:
    """One of the commands in `models/`, as a process."""
    return [sys.executable, "-m", f"models.{name}", *arguments]


@dataclass(frozen=True)
class Outcome:
    """The exit status and the output of a command."""

    status: int
    output: str


@dataclass(frozen=True)
class Workplace:
    """A folder with a config, a text and runs.

    Attributes:
        root: of all; the uninterrupted run is in `whole`.
        own: of one case.
        options: overrides of every run's config.
    """

    root: Path
    own: Path
    options: tuple[str, ...] = ()

    @staticmethod
    def make(root: Path, *options: str) -> "Workplace":
        """Writes the config and the text."""
        (root / "text").mkdir()
        for number in range(20):
            (root / "text" / f"{number}.txt").write_text(f"never odd or even, {number} times. " * 10)
        (root / "config.yaml").write_text(_CONFIG)
        return Workplace(root, root, options)

    def inside(self, name: str) -> "Workplace":
        """The same, with the folder of one case."""
        own = self.root / f"case {name}"
        own.mkdir()
        return Workplace(self.root, own, self.options)

    def train(self, run: str | Path, *overrides: str, config: str | Path = "config.yaml") -> list[str]:
        """The arguments of `models.train_lm` for a run in this folder."""
        data = ("--data.sources.text.paths", f"[{self.root}/text/*.txt]")
        cache = ("--data.cache_dir", f"{self.root}/cache")
        run_dir = ("--trainer.run_dir", f"{self.root / run}")
        return ["--config_path", f"{self.root / config}", *data, *cache, *run_dir, *self.options, *overrides]

    def process(self) -> dict[str, Any]:
        """The options of `subprocess` for its processes."""
        cache = {"JAX_COMPILATION_CACHE_DIR": f"{self.root}/compiled", "JAX_PLATFORMS": "cpu"}
        less = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
        environment = {**os.environ, **cache, **less, "PYTHONPATH": f"{REPOSITORY}"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return {"cwd": REPOSITORY, "env": environment, **streams}

    def named(self, arguments: Iterable[str]) -> Iterator[str]:
        """The arguments with the names of its folders filled in."""
        return (argument.format(root=self.root, own=self.own) for argument in arguments)

    def ended(self, name: str, *arguments: str, **more: Any) -> Outcome:
        """Runs a command to its end."""
        done = subprocess.run(command(name, *arguments), check=False, **self.process(), **more)
        return Outcome(done.returncode, done.stdout)

    def weights(self, run: str) -> bytes:
        """The weights that a finished run trained, exported."""
        out = f"{self.root / run} exported"
        outcome = self.ended("export_hf", "--run_dir", f"{self.root / run}", "--out", out)
        assert not outcome.status, outcome.output
        return Path(out, "model.safetensors").read_bytes()

    def copied_run(self) -> Path:
        """A copy of the uninterrupted run as it was after its last checkpoint."""
        shutil.copytree(self.root / "whole", self.own / "run")
        (self.own / "run/result.json").unlink()
        config = self.own / "run/config.yaml"
        config.write_text(config.read_text().replace(f"{self.root}/whole", f"{self.own}/run"))
        return self.own / "run"


@dataclass(frozen=True)
class Case:
    """A fault or a bad input.

    Attributes:
        name: of the case.
        run: causes the fault and runs the command; returns None where this process lacks the rights.
        message: part of the command's message.
        status: the exit status.
    """

    name: str
    run: Callable[[Workplace], Outcome | None]
    message: str
    status: int = 1

    def ends_well(self, outcome: Outcome) -> bool:
        """Whether the command ended with the status and the message, and no other."""
        one_message = outcome.output.count("error: ") == (self.status == 1)
        no_trace = "Traceback" not in outcome.output
        return outcome.status == self.status and one_message and no_trace and self.message in outcome.output


def _train(*overrides: str, name: str = "train_lm") -> Callable[[Workplace], Outcome]:
    return lambda place: place.ended(name, *place.train(place.own / "run", *overrides))


def _ended(name: str, *arguments: str) -> Callable[[Workplace], Outcome]:
    """Another command; its arguments may name the folders as `{root}` and `{own}`."""
    return lambda place: place.ended(name, *place.named(arguments))


def _with_config(text: str | bytes, *overrides: str) -> Callable[[Workplace], Outcome]:
    def run(place: Workplace) -> Outcome:
        config = place.own / "case.yaml"
        config.write_bytes(text if isinstance(text, bytes) else text.encode())
        (place.own / "note.txt").write_text("some text")
        return place.ended("train_lm", *place.train(place.own / "run", *overrides, config=config))

    return run


def _run_is_a_file(place: Workplace) -> Outcome:
    (place.own / "run").write_text("mine")
    return place.ended("train_lm", *place.train(place.own / "run"))


def _without_permission(place: Workplace) -> Outcome | None:
    place.own.chmod(0o500)
    return None if os.geteuid() == 0 else place.ended("train_lm", *place.train(place.own / "run"))


@contextlib.contextmanager
def _mounted(folder: Path, options: str) -> Iterator[bool]:
    """Mounts a small file system; yields whether this process may."""
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", f"{folder}"]
    try:
        done = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", f"{folder}"], check=True)


def _on_a_disk(options: str) -> Callable[[Workplace], Outcome | None]:
    def run(place: Workplace) -> Outcome | None:
        with _mounted(place.own, options) as mounted:
            return place.ended("train_lm", *place.train(place.own / "run")) if mounted else None

    return run


def _files_limited(place: Workplace) -> Outcome:
    limits = (resource.RLIMIT_FSIZE, (40_000, 40_000))
    arguments = place.train(place.own / "run")
    return place.ended("train_lm", *arguments, preexec_fn=lambda: resource.setrlimit(*limits))


def _damaged(name: str, damage: Callable[[bytes], bytes]) -> Callable[[Workplace], Outcome]:
    """Damages a file of the run to resume, which the command must not change."""

    def run(place: Workplace) -> Outcome:
        file = place.copied_run() / name
        file.write_bytes(before := damage(file.read_bytes()))
        outcome = place.ended("train_lm", *place.train(place.own / "run"))
        touched = "" if file.read_bytes() == before else f"error: {file} was written to\n"
        return Outcome(outcome.status, outcome.output + touched)

    return run


def _linked_checkpoints(place: Workplace) -> Outcome:
    folder = place.copied_run()
    shutil.move(folder / "checkpoints", place.own / "elsewhere")
    (folder / "checkpoints").symlink_to(place.own / "elsewhere")
    return _overwritten(place)


def _overwritten(place: Workplace) -> Outcome:
    """Starts a new run, which must not delete the earlier one."""
    overwrite = ("--trainer.checkpoint.overwrite", "true")
    outcome = place.ended("train_lm", *place.train(place.own / "run", *overwrite))
    lost = "" if (place.own / "run/metrics.jsonl").exists() else "error: the metrics are gone\n"
    return Outcome(outcome.status, outcome.output + lost)


def _handles_signals(place: Workplace, process: subprocess.Popen) -> bool:
    """Whether a process has its own handler, which it sets before it imports modules, according to Linux."""
    status = Path(f"/proc/{process.pid}/status")
    caught = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(caught[0], 16) >> (SIGTERM - 1) & 1)


def _tokenizes(place: Workplace, process: subprocess.Popen) -> bool:
    return (place.own / "cache").exists()


def _has_done_steps(place: Workplace, process: subprocess.Popen) -> bool:
    file = place.own / "run/metrics.jsonl"
    return file.exists() and file.read_text().count("\n") > 2


def _signalled(
    number: int, once: Callable[[Workplace, subprocess.Popen], bool], *, after: float = 0
) -> Callable[[Workplace], Outcome | None]:
    """Sends a signal some seconds after a condition of the command holds."""

    def run(place: Workplace) -> Outcome | None:
        if once is _handles_signals and not Path("/proc/self/status").exists():
            return None
        arguments = place.train(place.own / "run", "--data.cache_dir", f"{place.own}/cache")
        process = subprocess.Popen(command("train_lm", *arguments), **place.process())
        while process.poll() is None and not once(place, process):
            time.sleep(0.005)
        time.sleep(after)
        process.send_signal(number)
        output, _ = process.communicate()
        return Outcome(process.returncode, output)

    return run


def _closed_output(place: Workplace) -> Outcome:
    arguments = place.train(place.own / "run")
    process = subprocess.Popen(
        command("train_lm", *arguments), **{**place.process(), "stderr": subprocess.PIPE}
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        errors = process.stderr.read()
    status = process.wait()
    return Outcome(
        status, errors + ("finished" if (place.own / "run/result.json").exists() else "not finished")
    )


def _flipped(pattern: str, *overrides: str, name: str = "train_lm") -> Callable[[Workplace], Outcome]:
    """Flips a bit in the middle of each matching file of the run and the cache.

    Args:
        pattern: a glob in the folder of the case.
        overrides: for resuming the training; all arguments of another command.
        name: of the command.
    """

    def run(place: Workplace) -> Outcome:
        place.copied_run()
        shutil.copytree(place.root / "cache", place.own / "cache")
        for file in place.own.glob(pattern):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        if name != "train_lm":
            return place.ended(name, *place.named(overrides))
        accept = ("--trainer.checkpoint.accept_changes", "true", "--trainer.num_steps", "160")
        more = (*accept, "--data.cache_dir", f"{place.own}/cache", *overrides)
        return place.ended("train_lm", *place.train(place.own / "run", *more))

    return run


_ARRAYS = "run/checkpoints/{}/state/ocdbt*/d/*"
_NEWEST = _ARRAYS.format(150)
_FITS = "This can't fit"
_OUT = ("--out", "{own}/out")
_WHOLE = ("--run_dir", "{root}/whole")
_PROMPT = ("--prompt", "a")
_SEED = ("--trainer.seed", "3")
_NOTE = "trainer: !include note.txt\n"
CASES = [
    Case("a number for a section", _with_config("trainer: 5\n", *_SEED), "has no keys"),
    Case("an included text for a section", _with_config(_NOTE, *_SEED), "has no keys"),
    Case("null for a section", _with_config("trainer:\n"), "got nothing (null)"),
    Case("an unknown key", _with_config(_CONFIG, "--trainer.num_step", "3"), "num_steps"),
    Case("an empty config", _with_config(""), "case.yaml is empty"),
    Case("half a config", _with_config(_CONFIG[:80]), "case.yaml"),
    Case("a config that is not UTF-8", _with_config(b"trainer: \xff"), "utf-8"),
    Case("a config of 100,000 levels", _with_config("[" * 100_000), "recursion depth"),
    Case("no such text", _train("--data.sources.text.paths", "[nowhere/*]"), "nowhere/*"),
    Case("a cut of more layers than there are", _train("--remat", "{nested: [7, 9]}"), "remat"),
    Case("names that no layer has", _train("--remat", "{save_block_internals: [scoers]}"), "scoers"),
    Case("hidden_dim 200,000", _train("--model.hidden_dim", "200000"), _FITS),
    Case("10**8 layers", _train("--model.num_layers", "100000000"), _FITS),
    Case("10**8 layers, planned", _train("--model.num_layers", "100000000", name="plan_lm"), _FITS),
    Case("a vocabulary of 10**11", _train("--vocab_size", "100000000000"), _FITS),
    Case(
        "10**9 new tokens",
        _ended("generate", "--run_dir", "{root}/whole", *_PROMPT, "--max_new_tokens", "1000000000"),
        "--max_new_tokens",
    ),
    Case("3 * 10**9 tokens in a sequence", _train("--data.seq_len", "3000000000"), "at most 2,147,483,647"),
    Case("a run folder that is a file", _run_is_a_file, "/run: "),
    Case("a run folder below a file", _train("--trainer.run_dir", f"{__file__}/run"), "fault_cases.py"),
    Case("a name that is too long", _train("--trainer.run_dir", "/tmp/" + "x" * 300), "too long"),
    Case("no permission", _without_permission, "Permission denied"),
    Case("a file system that is read-only", _on_a_disk("ro"), "Read-only file system"),
    Case("a full disk, while a checkpoint is written", _on_a_disk("size=600k"), "No space left on device"),
    Case("a limit on the size of files", _files_limited, "File too large"),
    Case("an empty config.yaml in the run", _damaged("config.yaml", lambda _: b""), "config.yaml is empty"),
    Case("half a config.yaml in the run", _damaged("config.yaml", lambda found: found[:99]), "can't be read"),
    Case("a config.yaml that is not UTF-8", _damaged("config.yaml", lambda found: b"\xff" + found), "utf-8"),
    Case("damaged metrics", _damaged("metrics.jsonl", lambda found: b"\0\n" + found), "line 1 is not a line"),
    Case("a flipped byte in the arrays of a checkpoint", _flipped(_ARRAYS.format("*")), "/run/"),
    Case(
        "a damaged checkpoint to export",
        _flipped(_NEWEST, "--run_dir", "{own}/run", *_OUT, name="export_hf"),
        "checkpoints/150",
    ),
    Case(
        "a damaged checkpoint to generate from",
        _flipped(_NEWEST, "--run_dir", "{own}/run", *_PROMPT, name="generate"),
        "checkpoints/150",
    ),
    Case("overwrite of a run whose checkpoints are a link", _linked_checkpoints, "is a symbolic link to"),
    Case("no run to generate from", _ended("generate", "--run_dir", "{own}", *_PROMPT), "run folder"),
    Case("no model to generate from", _ended("generate", "--model", "{own}/none", *_PROMPT), "none"),
    Case("no run to export", _ended("export_hf", "--run_dir", "{own}", *_OUT), "No checkpoint in"),
    Case("an export onto something", _ended("export_hf", *_WHOLE, "--out", "{root}/whole"), "whole"),
    Case("SIGINT during imports", _signalled(SIGINT, _handles_signals), "while the program was", 75),
    Case("SIGINT before the first step", _signalled(SIGINT, _tokenizes), "before a step was done", 75),
    Case("SIGTERM before the first step", _signalled(SIGTERM, _tokenizes, after=0.5), "by SIGTERM", 75),
    Case("SIGINT after the first step", _signalled(SIGINT, _has_done_steps), "--trainer.run_dir", 75),
    Case("SIGTERM after the first step", _signalled(SIGTERM, _has_done_steps), "--trainer.run_dir", 75),
    Case("standard output is closed", _closed_output, "finished", 0),
]
