"""What a call of a program needs: memory, FLOPs, transfers and a bound on its time; and
policies compared.
"""

import dataclasses

from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec
from ._compiled_text import Buffer
from ._flops import Flops
from ._table import as_table, common_unit, readable_bytes, readable_count
from ._targets import Target


@dataclasses.dataclass(frozen=True)
class HostBytes:
    """Bytes in host memory that the program's device addresses: offloaded or given
    there.
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
        moved = max(flops.bytes_from_host, flops.bytes_to_host)
        return TimeBound(
            flops.matmul / devices / target.flops, moved / devices / target.link
        )

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
        where = (
            self.target
            if self.devices == 1
            else f"{self.devices} x {self.target}, per device"
        )
        signs = {
            "arguments": 1,
            "outputs": 1,
            "aliased": -1,
            "temporaries": 1,
            "total": 1,
        }
        rows = [
            (
                name,
                *(readable_bytes(sign * getattr(of, name)) for of in (self, self.host)),
            )
            for name, sign in signs.items()
        ]
        flops, least = self.flops, self.least_time
        sizes = map(readable_bytes, (flops.bytes_from_host, flops.bytes_to_host))
        moved = "{} from the host, {} to the host".format(*sizes)
        if least is not None:
            moved += (
                f"; at least {least.transfer:.3g} s of transfers and"
                f" {least.compute:.3g} s of compute"
            )
            moved += " behind which they hide" if least.hidden else ""
        notes = [
            f"one device has {readable_bytes(self.capacity)}" if self.capacity else "",
            f"{readable_count(flops.matmul)} FLOP in matrix products",
            moved if flops.moved else "",
            (
                f"{readable_bytes(self.sent)} sent by each device to others"
                if self.sent
                else ""
            ),
            f"compiled in {self.compile_seconds:.1f} s",
            *flops.reasons,
            (
                "the largest buffers beside the arguments, not all of them alive at"
                " once:"
                if self.largest
                else ""
            ),
            *(f"  {each}" for each in self.largest),
        ]
        return as_table(
            f"memory on {where}", [("", "device", "host"), *rows], filter(None, notes)
        )


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
            name = name.removeprefix("ScanCheckpointPolicy(").removesuffix(")") or name
        return self.label or (f"{name}, streamed" if self.streamed else name)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Policies of one program side by side, in the order in which they were tried.

    Attributes:
        trials: one for each policy.
        title: of the table.
        notes: what stands below the table.
    """

    trials: tuple[Trial, ...]
    title: str = "memory by policy"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = [trial.report for trial in self.trials if trial.report is not None]
        least = min((each.flops.matmul for each in found), default=0)
        size, unit = common_unit(
            max(each.total, each.host.total, each.flops.moved) for each in found
        )
        rows = [(trial.name, _row(trial.report, size, least)) for trial in self.trials]
        headings = [name for name in _COLUMNS if any(name in row for _, row in rows)]
        cells = [
            [name, *(row.get(heading, "") for heading in headings)]
            for name, row in rows
        ]
        notes = [
            *(
                [f"FLOPs / least: {readable_count(least)} FLOP in matrix products"]
                if least
                else []
            ),
            *sorted(
                {f"?: {reason}" for each in found for reason in each.flops.reasons}
            ),
            *(_COLUMNS[name] for name in headings if _COLUMNS[name]),
            *(
                f"{one.name}: {str(one.failure).splitlines()[0]}"
                for one in self.trials
                if one.failure
            ),
        ]
        title = f"{self.title}; sizes in {unit}"
        return as_table(title, [["policy", *headings], *cells], (*notes, *self.notes))


_COLUMNS = {
    "total": "",
    "temp.": "",
    "host": "",
    "moved": "moved: between device and host",
    "sent": "sent: to other devices, by each",
    "link": "link: seconds that it takes, or hidden behind compute",
    "FLOPs": "",
    "compiled": "compiled: in so many seconds",
}
"""The columns of a comparison, and what is said of them below it."""


def _row(found: MemoryReport | None, unit: int, flops: int) -> dict[str, str]:
    if found is None:
        return {"total": "refused"}
    sizes = {"total": found.total, "temp.": found.temporaries, "host": found.host.total}
    sizes |= {"moved": found.flops.moved, "sent": found.sent}
    row = {
        name: f"{size / unit:.2f}"
        for name, size in sizes.items()
        if size or name == "temp."
    }
    if (least := found.least_time) and least.transfer:
        row["link"] = "hidden" if least.hidden else f"{least.transfer:.3g}"
    if flops:
        row["FLOPs"] = (
            f"{found.flops.matmul / flops:.2f}{'' if found.flops.exact else ' ?'}"
        )
    return row | {"compiled": f"{found.compile_seconds:.1f}"}
