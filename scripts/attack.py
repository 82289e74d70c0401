"""Random programs with the library and without it, from seeds, until a time or a number
of seeds is over.

    python -m scripts.attack --seeds 0:10000 --jobs 2 --log runs/attack.jsonl
    python -m scripts.attack --seeds 17:18 --smallest

Each seed is a program of `tests/random_programs`. The log has a line of JSON for each,
and a run goes on where the log ends. Programs run in processes of their own: one that
crashes or hangs is logged, and the next seed follows in a new process. The status is 1
where the library failed.
"""

import argparse
import collections
import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEVICES = ["--xla_force_host_platform_device_count=8"]
# Not xla_cpu_use_fusion_emitters=false, with which XLA (jaxlib 0.10.2) makes NaN of
# some references.
FLAGS = [
    *DEVICES,
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
PROGRAMS_OF_A_PROCESS = 100  # JAX keeps what it traced and compiled


def arguments() -> argparse.Namespace:
    """What the command was given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--seeds", default="0:100", help="from the first to before the last, A:B"
    )
    parser.add_argument(
        "--seconds", type=float, help="start no program after this time"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--only", help="programs with this entry point, part, transformation or run"
    )
    parser.add_argument(
        "--log",
        type=Path,
        help="a file of JSON lines; seeds that are in it are skipped",
    )
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds after which a program hangs"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="programs with fewer layers and transformations",
    )
    parser.add_argument(
        "--smallest", action="store_true", help="look for a simpler program that fails"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(options: argparse.Namespace) -> None:
    """Run the programs of the seeds on the standard input, and print a line for
    each.
    """
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")

    from tests.random_programs import checking, programs

    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # tracing makes many objects
    for line in sys.stdin:
        spec = programs.draw(int(line), is_small=options.small)
        start = time.process_time()
        outcome = checking.check(spec)
        found = {"kind": outcome.kind, "detail": outcome.detail, "spec": str(spec)}
        if options.smallest and outcome.is_failure:
            found["smallest"] = str(checking.smallest(spec, outcome.kind))
        print(
            json.dumps(found | {"seconds": round(time.process_time() - start, 2)}),
            flush=True,
        )


class Worker:
    """A process that runs programs, and is replaced by another where it dies or
    hangs.
    """

    def __init__(self, options: argparse.Namespace, flags: list[str]):
        self.options = options
        self.flags = flags
        self.count = 0
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()

    def start(self) -> subprocess.Popen[str]:
        """A new process, whose lines go to a queue."""
        command = [sys.executable, "-m", "scripts.attack", "--worker"]
        command += [
            f"--{name}" for name in ("small", "smallest") if getattr(self.options, name)
        ]
        environment = {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore", **os.environ}
        environment["XLA_FLAGS"] = (
            f"{environment.get('XLA_FLAGS', '')} {' '.join(self.flags)}"
        )
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")  # the process has ended

        threading.Thread(target=read, daemon=True).start()
        self.lines = lines
        self.count = 0
        return process

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def run(self, seed: int) -> dict[str, Any]:
        """What came of a seed."""
        if self.process is None:
            self.process = self.start()
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=self.options.timeout)
        except queue.Empty:
            self.stop()
            return {
                "kind": "hang",
                "detail": f"no result after {self.options.timeout} s",
            }
        if not line:
            status = self.process.wait()
            self.stop()
            return {"kind": "died", "detail": f"status {status}"}
        self.count += 1
        if self.count == PROGRAMS_OF_A_PROCESS:
            self.stop()
        return json.loads(line)


def is_wanted(seed: int, options: argparse.Namespace) -> bool:
    """Whether the program of a seed has the feature that was asked for."""
    if options.only is None:
        return True
    from tests.random_programs.programs import draw

    spec = draw(seed, is_small=options.small)
    return options.only in (
        spec.entry,
        spec.run,
        spec.dtype,
        *spec.parts,
        *spec.transforms,
    )


def seeds_to_run(options: argparse.Namespace) -> Iterator[int]:
    """The seeds that are not in the log."""
    first, last = map(int, options.seeds.split(":"))
    done = set[int]()
    if options.log is not None and options.log.exists():
        done = {
            json.loads(line)["seed"] for line in options.log.read_text().splitlines()
        }
    for seed in range(first, last):
        if seed not in done and is_wanted(seed, options):
            yield seed


def main() -> int:
    """Run programs in as many processes as asked for."""
    options = arguments()
    if options.worker:
        work(options)
        return 0
    start = time.monotonic()
    lock = threading.Lock()
    counts = collections.Counter[str]()
    seeds = seeds_to_run(options)

    def of_a_process() -> None:
        worker = Worker(options, FLAGS)
        while options.seconds is None or time.monotonic() - start < options.seconds:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                break
            found = {"seed": seed, **worker.run(seed)}
            if found["kind"] == "wrong":
                # XLA (jaxlib 0.10.2) makes NaN of a few programs that it does not
                # optimize.
                optimizing = Worker(options, DEVICES)
                found |= optimizing.run(seed)
                optimizing.stop()
            with lock:
                record(options.log, found)
                counts[found["kind"]] += 1
        worker.stop()

    threads = [threading.Thread(target=of_a_process) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(
        f"{counts.total()} programs in {time.monotonic() - start:.0f} s:", dict(counts)
    )
    return int(bool(counts.keys() - {"equal", "refused", "invalid"}))


def record(log: Path | None, found: dict[str, Any]) -> None:
    """Write a result to the log, and print one that is a failure."""
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    if found["kind"] not in ("equal", "refused", "invalid"):
        print(f"seed {found['seed']}: {found['kind']}: {found['detail']}")
        print(f"    {found.get('smallest', found.get('spec', ''))}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
