"""One picture of what recomputation buys: device memory against arithmetic, a point for each policy."""

from collections.abc import Mapping
from pathlib import Path

from ._plan import Comparison
from ._report import MemoryReport


def plot(
    reports: Comparison | Mapping[str, MemoryReport],
    path: str | Path,
    title: str = "Memory against recomputation",
) -> Path:
    """Draw the device memory of every policy against its arithmetic, and write it as a PNG.

    Args:
        reports: as `compare` returns them, or by name.
        path: file to write.
        title: heading of the picture.

    Returns:
        The path written to. Points are total bytes on a device (filled) and, where a policy uses it, on
        the host (hollow, joined to its point); arithmetic is relative to the policy that does least.

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
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, report in reports.items():
        recomputed = report.flops.matmul / least
        (point,) = axes.plot([recomputed], [report.total / 2**30], "o", label=name)
        if report.host.total:
            ends = [report.total / 2**30, report.host.total / 2**30]
            axes.plot([recomputed] * 2, ends, ":", color=point.get_color())
            axes.plot(recomputed, ends[1], "o", mfc="none", color=point.get_color())
    axes.set_xlabel("arithmetic, relative to the least (matrix products)")
    axes.set_ylabel("GiB (filled: device, hollow: host)")
    axes.set_yscale("log")
    axes.set_title(f"{title} ({next(iter(reports.values())).target})")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(str(path))
    return Path(path)
