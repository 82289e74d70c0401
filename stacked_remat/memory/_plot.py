"""Plots device memory against arithmetic, a point for each policy."""

from collections.abc import Mapping
from pathlib import Path

from ._plan import Comparison
from ._report import MemoryReport


def plot(
    reports: Comparison | Mapping[str, MemoryReport],
    path: str | Path,
    title: str = "Memory against recomputation",
) -> Path:
    """Plot the device memory of every policy against its arithmetic, as a PNG.

    Args:
        reports: as `compare` returns them, or by name.
        path: file to write.
        title: heading of the picture.

    Returns:
        `path`. Points are total bytes on a device (filled) and, where a policy uses it, on the host (hollow,
        joined by a line); arithmetic is relative to the policy with the least.

    Raises:
        ImportError: matplotlib is not installed; names the extra.
        ValueError: no policy compiled, or their arithmetic is unknown.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'stacked_remat[plot]'") from error
    if isinstance(reports, Comparison):
        reports = {repr(t.policy): t.report for t in reports.trials if t.report is not None}
    least = min((report.flops.matmul for report in reports.values()), default=0)
    if least == 0:
        raise ValueError("nothing to plot: no policy was compiled, or none of them has a matrix product")
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, report) in enumerate(reports.items()):
        recomputed, device, host = (
            report.flops.matmul / least,
            report.total / 2**30,
            report.host.total / 2**30,
        )
        marker, color = _MARKERS[index // 10 % len(_MARKERS)], f"C{index % 10}"
        axes.plot(recomputed, device, marker, color=color, label=name, alpha=0.8)
        if host:
            axes.plot([recomputed] * 2, [device, host], ":", color=color)
            axes.plot(recomputed, host, marker, mfc="none", color=color)
    axes.set_xlabel("arithmetic, relative to the least (matrix products)")
    axes.set_ylabel("GiB (filled: device, hollow: host)")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    labelled = "125" if high > 10 * low else "123456789"  # more would overlap
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in labelled else "")
    axes.set_title(f"{title} ({next(iter(reports.values())).target})")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize="small")
    FigureCanvasAgg(figure).print_png(str(path))
    return Path(path)


_MARKERS = "osD^v"
