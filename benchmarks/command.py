"""Makes a command of a function that yields rows of results."""

import argparse
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import jax

from stacked_remat.memory import readable_bytes

from .record import RESULTS, allocate_as_needed, cpu_name, write_results

Rows = Iterator[Mapping[str, Any]]

_BYTES = (
    "arguments",
    "outputs",
    "temporaries",
    "host",
    "host_temporaries",
    "total",
    "sent",
)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A command that has the keyword arguments of a function as options, with their
    defaults.

    A tuple takes any number of values, a bool none, and of a dataclass each field is an
    option. The argument `overrides` takes options that no argument has, which are keys
    of a config. `--name` and `--out` change the name of the file of results and its
    folder.

    Attributes:
        rows: the function; each row is printed and written when it is found.
        result: the name of the file without `.json`, or a format of it; of the options,
            `platform` and `device`.
    """

    rows: Callable[..., Rows]
    result: str | Callable[..., str]

    def __call__(self, arguments: Sequence[str] | None = None) -> Path:
        """Run it with the options of a command line; the file of results."""
        allocate_as_needed()
        given = self._given(arguments)
        name = given.pop("name")
        out = given.pop("out")
        groups = [
            vars(value) for value in given.values() if dataclasses.is_dataclass(value)
        ]
        flat = {
            key: value for group in (*groups, given) for key, value in group.items()
        }
        named = self.result if callable(self.result) else self.result.format
        kind = jax.local_devices()[0].device_kind
        where = {
            "platform": jax.default_backend(),
            "device": re.sub(r"\W+", "_", kind.lower()),
        }
        path = out / f"{name or named(**flat, **where)}.json"
        on_cpu = {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0))}
        measured = {} if "target" in given else {"device": kind, **on_cpu}
        found: list[Mapping[str, Any]] = []
        for row in self.rows(**given):
            found.append(row)
            print(
                "  ".join(
                    f"{key} {_readable(key, value)}" for key, value in row.items()
                ),
                flush=True,
            )
            write_results(path, **measured, **given, rows=found)
        if not found:
            raise SystemExit(f"nothing is left to measure of {given}")
        print(f"wrote {path}")
        return path

    def _given(self, arguments: Sequence[str] | None) -> dict[str, Any]:
        about = sys.modules[self.rows.__module__].__doc__
        parser = argparse.ArgumentParser(
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--name")
        parser.add_argument("--out", type=Path, default=RESULTS)
        parameters = inspect.signature(self.rows).parameters.values()
        groups = {
            one.name: one.default
            for one in parameters
            if dataclasses.is_dataclass(one.default)
        }
        for group in groups.values():
            for field in dataclasses.fields(group):
                _add_option(parser, field.name, field.type, getattr(group, field.name))
        for one in parameters:
            if one.name not in ("overrides", *groups):
                _add_option(parser, one.name, one.annotation, one.default)
        known, rest = parser.parse_known_args(arguments)
        given = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in vars(known).items()
        }
        if "overrides" in inspect.signature(self.rows).parameters:
            given["overrides"] = tuple(rest)
        elif rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        for name, group in groups.items():
            given[name] = type(group)(**{key: given.pop(key) for key in vars(group)})
        return given


def benchmark(
    result: str | Callable[..., str],
) -> Callable[[Callable[..., Rows]], Benchmark]:
    """Decorates a function that yields rows; see `Benchmark`."""
    return lambda rows: Benchmark(rows, result)


def one_of(**benchmarks: Benchmark) -> Callable[..., Path]:
    """A command whose first argument may name one of several benchmarks; otherwise it
    is the first.
    """

    def main(arguments: Sequence[str] | None = None) -> Path:
        given = sys.argv[1:] if arguments is None else arguments
        if given and given[0] in benchmarks:
            return benchmarks[given[0]](given[1:])
        return next(iter(benchmarks.values()))(given)

    return main


def agreeing(rows: Rows, problem: str) -> Rows:
    """The rows of a comparison; raises SystemExit after the last one if any does not
    agree, with `problem` and how far each of those is off.
    """
    wrong = []
    for row in rows:
        yield row
        if not row.get("agrees", True):
            compared = [row[key] for key in ("kernel", "case") if key in row]
            wrong.append(f"{', '.join(compared)}: off by {row['off']:.2g}")
    if wrong:
        raise SystemExit(f"{problem}: {'; '.join(wrong)}")


def _add_option(
    parser: argparse.ArgumentParser, name: str, kind: Any, default: Any
) -> None:
    if kind is bool:
        parser.add_argument(f"--{name}", action="store_true")
    elif get_origin(kind) is tuple:
        parser.add_argument(
            f"--{name}", type=get_args(kind)[0], nargs="+", default=default
        )
    else:
        parser.add_argument(f"--{name}", type=kind, default=default)


def _readable(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "("
            + ", ".join(
                f"{name} {_readable(name, inner)}" for name, inner in value.items()
            )
            + ")"
        )
    if isinstance(value, int) and (key in _BYTES or key.endswith("_bytes")):
        return readable_bytes(value)
    return f"{value / 1e12:,.1f} TFLOP" if key == "matmul_flops" else str(value)
