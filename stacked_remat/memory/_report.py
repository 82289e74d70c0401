"""What a call of a program needs: memory, FLOPs, transfers, least time; and policies
compared.

Plain records and how they print. `_call.py` makes a `MemoryReport` of each compiled
program; `_plan.py` puts one for each policy into a `Trial`, and these into a
`Comparison`. `_table.py` lays out what is printed.
"""

import dataclasses
import math
from collections.abc import Sequence

from .. import ScanCheckpointPolicy, ScanCheckpointSpec
from .._policy import recomputes_nothing, resolve_policy, shortest_name
from ._compiled_text import Buffer
from ._flops import Flops
from ._table import as_table, common_unit, readable_bytes, readable_count
from ._targets import Target


@dataclasses.dataclass(frozen=True)
class HostBytes:
    """Bytes in host memory that the program's device addresses: offloaded or given
    there.

    Attributes:
        arguments: of the arguments that lie there.
        outputs: of the results that lie there, aliased ones included.
        temporaries: what the program allocates there while it runs.
        aliased: of results written into donated arguments.
    """

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    aliased: int = 0

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class TimeBound:
    """The least time of one call of a program: two quotients, not a prediction.

    It leaves out elementwise operations, the bandwidth of device memory and
    communication between devices, and takes transfers to run beside compute, those to
    the host beside those from it. Training usually reaches 0.3 to 0.5 of the device's
    peak.

    Attributes:
        compute: seconds of the matrix products at the device's peak.
        transfer: seconds of the transfers between device and host, of the slower
            direction.
    """

    compute: float
    transfer: float

    @staticmethod
    def of(flops: Flops, target: Target, devices: int = 1) -> "TimeBound | None":
        """The bound for costs that are divided over devices; None if the target's
        figures are not known.
        """
        if target.flops is None or target.link is None:
            return None
        # The link works in both directions at once.
        moved = max(flops.bytes_from_host, flops.bytes_to_host)
        compute = flops.matmul / devices / target.flops
        transfer = moved / devices / target.link
        return TimeBound(compute, transfer)

    @property
    def hidden(self) -> bool:
        """Whether compute takes as long as the transfers, or longer."""
        return self.transfer <= self.compute


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What one call of a program needs, per device unless said otherwise.

    Attributes:
        target: name of the target it was compiled for.
        arguments: bytes of the arguments in device memory.
        outputs: bytes of the results in device memory, aliased ones included.
        temporaries: peak bytes that the program allocates while it runs.
        aliased: bytes of results written into donated arguments.
        host: the same four for host memory.
        flops: FLOPs of one call, and bytes moved between host and device, summed over
            devices.
        compile_seconds: wall time of the compilation.
        devices: number of devices the program runs on.
        capacity: bytes of memory of one device; None where it is not known.
        least_time: of one call, by its FLOPs and its transfers; None where the device's
            peak or link is not known.
        sent: bytes that a device sends to others in collectives, if each goes round a
            ring. Trip counts are as for `flops`.
        largest: the largest buffers in device memory beside the arguments, in the whole
            program, not at its peak: a compiler does not say when each is alive.
    """

    target: str
    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    host: HostBytes
    flops: Flops
    compile_seconds: float
    devices: int = 1
    capacity: int | None = None
    least_time: TimeBound | None = None
    sent: int = 0
    largest: tuple[Buffer, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of device memory while the program runs: arguments + outputs - aliased
        + temporaries.
        """
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def __str__(self) -> str:
        where = self.target
        if self.devices > 1:
            where = f"{self.devices} x {self.target}, per device"
        rows = [("", "device", "host")]
        for name in ("arguments", "outputs", "aliased", "temporaries", "total"):
            # So that the column adds up to the total.
            sign = -1 if name == "aliased" else 1
            on_device = readable_bytes(sign * getattr(self, name))
            on_host = readable_bytes(sign * getattr(self.host, name))
            rows.append((name, on_device, on_host))
        return as_table(f"memory on {where}", rows, self._notes())

    def _notes(self) -> list[str]:
        """What stands below the table."""
        notes = []
        if self.capacity:
            notes.append(f"one device has {readable_bytes(self.capacity)}")
        notes.append(f"{readable_count(self.flops.matmul)} FLOP in matrix products")
        if self.flops.moved:
            notes.append(self._transfers())
        if self.flops.bytes_to_disk:
            on_disk = readable_bytes(self.flops.bytes_to_disk)
            notes.append(f"{on_disk} of carries written to disk, and read back")
        if self.sent:
            notes.append(f"{readable_bytes(self.sent)} sent by each device to others")
        notes.append(f"compiled in {self.compile_seconds:.1f} s")
        notes += self.flops.reasons
        if self.largest:
            notes.append(
                "the largest buffers beside the arguments, not all of them alive at"
                " once:"
            )
        notes += map("  {}".format, self.largest)
        return notes

    def _transfers(self) -> str:
        from_host = readable_bytes(self.flops.bytes_from_host)
        to_host = readable_bytes(self.flops.bytes_to_host)
        text = f"{from_host} from the host, {to_host} to the host"
        least = self.least_time
        if least is not None:
            text += (
                f"; at least {least.transfer:.3g} s of transfers and"
                f" {least.compute:.3g} s of compute"
            )
            if least.hidden:
                text += " behind which they hide"
        return text


@dataclasses.dataclass(frozen=True)
class Trial:
    """One policy, compiled.

    Attributes:
        policy: the policy, as it was given.
        report: its memory and FLOPs; None if the compiler refused it.
        failure: the compiler's error, if it refused.
        streamed: whether weights were on the host.
        label: what tables call it; the policy by default.
    """

    policy: ScanCheckpointSpec
    report: MemoryReport | None
    failure: Exception | None = None
    streamed: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """What tables call it: `'nested'`, or its settings, as `nested=True,
        save_carries='offload'`.
        """
        name = repr(self.policy)
        if isinstance(self.policy, ScanCheckpointPolicy):
            # An alias, or the settings without the class around them.
            name = shortest_name(self.policy)
            name = name.removeprefix("ScanCheckpointPolicy(").removesuffix(")")
        return self.label or (f"{name}, streamed" if self.streamed else name)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Policies of one program side by side, in the order in which they were tried.

    Attributes:
        trials: one for each policy.
        title: of the table.
        notes: what stands below the table.
        flops_of_false: FLOPs of matrix products of the program under `False`, which
            runs nothing again, as it was traced; None if it can't be.
        layers: the number of layers of a program without matrix products, of which
            only their runs say what a policy costs; 0 if it is not known.
    """

    trials: tuple[Trial, ...]
    title: str = "memory by policy"
    notes: tuple[str, ...] = ()
    flops_of_false: int | None = None
    layers: int = 0

    def __str__(self) -> str:
        reports = [trial.report for trial in self.trials if trial.report is not None]
        base_name, base_flops = self.base
        rows = [["policy", *_COLUMNS]]
        for trial in self.trials:
            rows.append([trial.name, *_cells(trial, base_flops, self.layers)])
        # A column that no row has a figure for is left out.
        names, *columns = zip(*rows, strict=True)
        columns = [column for column in columns if {*column[1:]} - {"", "0"}]
        headings = [column[0] for column in columns]
        table = [*zip(names, *columns, strict=True)]
        notes = self._notes(reports, headings)
        if base_flops:
            count = readable_count(base_flops)
            notes.insert(0, f"FLOPs / {base_name}: {count} FLOP in matrix products")
        return as_table(self.title, table, notes)

    @property
    def base(self) -> tuple[str, int]:
        """What FLOPs are relative to, `False` or else the trial with the fewest: its
        name, and its FLOPs.
        """
        if self.flops_of_false is not None:
            return "False", self.flops_of_false
        fewest = "", 0
        for trial in self.trials:
            if trial.report is None:
                continue
            flops = trial.report.flops.matmul
            if not fewest[0] or flops < fewest[1]:
                fewest = trial.name, flops
        return fewest

    def _notes(self, reports: list[MemoryReport], headings: list[str]) -> list[str]:
        """What stands below the table: what its columns mean, and why figures are not
        exact or missing.
        """
        notes = []
        if "FLOPs" in headings:
            reasons = set().union(*(report.flops.reasons for report in reports))
            notes += map("?: {}".format, sorted(reasons))
        notes += filter(None, map(_COLUMNS.get, headings))
        for trial in self.trials:
            if trial.failure:
                # The compiler's message goes on for pages.
                first_line = str(trial.failure).splitlines()[0]
                notes.append(f"{trial.name}: {first_line}")
            if trial.report is not None:
                if unknown := unknown_names(trial.policy, trial.report.flops):
                    notes.append(f"{trial.name}: {unknown}")
        if _are_alike(self.trials):
            notes.append(
                "all policies have the same figures: the program has too few layers"
                " for them to differ, or does not pass remat=remat to its fold or scan"
            )
        return [*notes, *self.notes]


def _are_alike(trials: Sequence[Trial]) -> bool:
    """Whether policies that differ have the same memory and FLOPs, as in a program that
    uses none of them.
    """
    reports = [trial.report for trial in trials if trial.report is not None]
    figures = set()
    for report in reports:
        figures.add((report.temporaries, report.flops.matmul, report.flops.moved))
    policies = {resolve_policy(trial.policy) for trial in trials}
    return len(figures) == 1 and len(policies) == len(reports) > 1


def unknown_names(spec: ScanCheckpointSpec, flops: Flops) -> str:
    """A remark about names of a policy that no value of the program has, whose figures
    these are.
    """
    policy = resolve_policy(spec)
    given: list[str] = []
    # Not names where it is a bool or one of JAX's policies
    if isinstance(policy.save_block_internals, tuple):
        given += policy.save_block_internals
    # A value that is moved has no name any more
    if not flops.moved:
        given += policy.offload_block_internals
    known = flops.names
    unknown = [repr(name) for name in given if name not in known]
    if not unknown:
        return ""
    has = ", ".join(map(repr, known)) or "no names (checkpoint_name)"
    return f"no value is named {', '.join(unknown)}; the program has: {has}"


# The columns of a comparison, left to right, and what is said of each below the table.
_COLUMNS = {
    "unit": "",
    "total": "",
    "temp.": "",
    "host": "",
    "moved": "moved: between device and host",
    "sent": "sent: to other devices, by each",
    "link": "link: seconds that it takes, or hidden behind compute",
    "FLOPs": "",
    "run again": "run again: layers or steps that the backward pass runs again",
    "compiled": "compiled: seconds of compiling",
}


def runs_again(policy: ScanCheckpointPolicy, layers: int) -> int:
    """How many layers run again in a stack of this length."""
    if recomputes_nothing(policy):
        return 0
    remat = policy.for_layers(layers)
    return remat.length - remat.first_layers + remat.replays


def _cells(trial: Trial, base_flops: int, layers: int) -> list[str]:
    """The figures of a row, by column: sizes in the row's unit, FLOPs relative to those
    of the base, and without one how many of the layers run again.

    `?` marks FLOPs that are not exact.
    """
    report = trial.report
    if report is None:
        return ["", "refused"] + [""] * (len(_COLUMNS) - 2)
    largest = max(report.total, report.host.total, report.flops.moved)
    unit, unit_name = common_unit([largest])

    def size(count: int) -> str:
        return _three_digits(count / unit) if count else ""

    link = flops = ""
    least = report.least_time
    if least and least.transfer:
        link = "hidden" if least.hidden else f"{least.transfer:.3g}"
    if base_flops:
        mark = "" if report.flops.exact else " ?"
        flops = f"{report.flops.matmul / base_flops:.2f}{mark}"
    run_again = ""
    # Without products nothing else says what a policy costs.
    if not base_flops and layers:
        run_again = f"{runs_again(resolve_policy(trial.policy), layers):,}"
    return [
        unit_name,
        size(report.total),
        # A zero of these is shown: policies change them.
        size(report.temporaries) or "0.00",
        size(report.host.total),
        size(report.flops.moved),
        size(report.sent),
        link,
        flops,
        run_again,
        f"{report.compile_seconds:.1f}",
    ]


def _three_digits(size: float) -> str:
    """A positive number with two decimals, or with as many as show three digits."""
    leading_zeros = max(0, -math.floor(math.log10(size)))
    return f"{size:.{2 + leading_zeros}f}"
