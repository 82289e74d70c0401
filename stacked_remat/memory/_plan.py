"""Chooses a remat policy: compiles candidates and takes the first that fits in memory."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from .._messages import parse_bytes
from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._host_arguments import arguments_on_host, host_memory_kind
from ._report import DoesNotFit, MemoryReport, report
from ._table import Table, Tabular, common_unit, readable_bytes, readable_count
from ._targets import Target

CANDIDATES: tuple[ScanCheckpointSpec, ...] = (
    False,
    True,
    "nested",
    ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "offload",
    *(ScanCheckpointPolicy(max_carries=most) for most in (8, 6, 4, 3, 2)),
)
"""What `plan` tries: from most device memory to least, then policies that use the host, then fewer carries
and more recomputation."""


class BudgetError(RuntimeError):
    """No candidate fits; the message holds the table of what was tried."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One policy, compiled.

    Attributes:
        policy: the policy, as it was given.
        report: its memory and arithmetic; None if the compiler refused it.
        failure: the compiler's reason, if it refused.
        streamed: whether weights were on the host.
    """

    policy: ScanCheckpointSpec
    report: MemoryReport | None
    failure: str = ""
    streamed: bool = False

    @property
    def name(self) -> str:
        return _name(self.policy, self.streamed)


@dataclasses.dataclass(frozen=True)
class Comparison(Tabular):
    """Policies of one program side by side, in the order in which they were tried.

    Attributes:
        trials: one for each policy.
        tokens_per_step: of one call on all devices, for the tokens per second that the link allows; None
            where they were not given.
    """

    trials: tuple[Trial, ...]
    tokens_per_step: int | None = None

    def _table(self, title: str = "memory by policy", notes: tuple[str, ...] = ()) -> Table:
        found = [trial.report for trial in self.trials if trial.report is not None]
        least = min((report.flops.matmul for report in found), default=0)
        size, unit = common_unit(size for report in found for size in _sizes(report))
        memory = (f"{name}\n{unit}" for name in ("total", "temp.", "host", "moved"))
        link = "s" if self.tokens_per_step is None else "tokens/s"
        columns = ("policy", *memory, f"link\n{link}", "FLOPs\n/ least", "compile\ns")
        rows = tuple(_row(trial, size, least, self.tokens_per_step) for trial in self.trials)
        explained = [f"least: {readable_count(least)} FLOP in matrix products"] if least else []
        if not all(report.flops.exact for report in found):
            explained.append("?: not exact; the report of that policy says why")
        if any(report.least_time and report.least_time.transfer for report in found):
            explained.append(
                "link: transfers are hidden behind compute, or "
                + (
                    "take so many seconds"
                    if self.tokens_per_step is None
                    else "allow at most so many tokens/s"
                )
            )
        failures = [f"{trial.name}: {trial.failure}" for trial in self.trials if trial.failure]
        return Table(title, columns, rows, (*explained, *failures, *notes))


@dataclasses.dataclass(frozen=True)
class Plan(Tabular):
    """The policy to use, and how it was found.

    Attributes:
        policy: the first candidate that fits, as it was given; with `first_layers` if `layers` was given.
        report: its memory and arithmetic.
        tried: everything that was compiled, in order.
        budget: bytes of device memory it had to fit in.
        streamed: whether it fits with weights on the host only.
    """

    policy: ScanCheckpointSpec
    report: MemoryReport
    tried: Comparison
    budget: int
    streamed: bool = False

    def _table(self) -> Table:
        note = f"{_name(self.policy, self.streamed)} fits {readable_bytes(self.budget)} a device"
        return self.tried._table("plan", (note,))


def compare(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    *args: PyTree,
    candidates: Sequence[ScanCheckpointSpec] = CANDIDATES,
    target: str | Target = "local",
    donate: str | Sequence[str] = (),
    streamed: Callable[..., Sequence[PyTree]] | None = None,
    tokens_per_step: int | None = None,
    **kwargs: PyTree,
) -> Comparison:
    """Compile a program under every policy and compare the reports. Nothing is executed.

    Args:
        fn_of_policy: makes the function to compile from a policy, for example
            `lambda remat: lambda blocks, x: train_step(blocks, x, remat=remat)`.
        *args: its arguments, as for `report`.
        candidates: the policies, in the order they are compiled and shown.
        target: as for `report`.
        donate: as for `report`.
        streamed: as for `plan`: every candidate is compiled with weights on the host too.
        tokens_per_step: as for `plan`.
        **kwargs: its keyword arguments.

    Returns:
        A trial for each candidate, with the reason for one that the compiler refuses.

    Raises:
        ValueError, TypeError: as `plan`, for `tokens_per_step` and `streamed`.

    Cost: one compilation a candidate, two with `streamed`.
    """
    _check_count("tokens_per_step", tokens_per_step, _TOKENS)
    attempt = _attempts(fn_of_policy, args, kwargs, target, donate, streamed)
    places = (False,) if streamed is None else (False, True)
    trials = [attempt(policy, on_host) for on_host in places for policy in candidates]
    return Comparison(tuple(trials), tokens_per_step)


def plan(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    *args: PyTree,
    budget: int | str,
    host_budget: int | str | None = None,
    candidates: Sequence[ScanCheckpointSpec] = CANDIDATES,
    target: str | Target = "local",
    donate: str | Sequence[str] = (),
    layers: int | None = None,
    streamed: Callable[..., Sequence[PyTree]] | None = None,
    tokens_per_step: int | None = None,
    **kwargs: PyTree,
) -> Plan:
    """Find the first of the candidates that fits in a budget. Nothing is executed.

    With `layers`, the rest of the budget is used for as many `first_layers` as fit. For a nested candidate
    they keep their carries, and so are not replayed, or their internals too, whichever needs less arithmetic;
    for one that offloads every carry they keep theirs on the device; for any other they keep their internals.

    Args:
        fn_of_policy: makes the function to compile from a policy, as for `compare`. It should be what will
            run: the whole training step, with its optimizer state and donation.
        *args: its arguments, as for `report`.
        budget: memory of each device, arguments and results included: bytes, or text such as `"80GiB"` or
            `"80GB"`. Allow for what the compiler does not count (fragmentation, library workspaces, other
            programs): nine tenths of the device is a usual figure.
        host_budget: the same for the host memory that one device uses; None for no limit.
        candidates: the policies, cheapest first.
        target: as for `report`.
        donate: as for `report`.
        layers: how many layers the stack has, to search for `first_layers`; None for no search.
        streamed: from the arguments to the same arguments, or their shapes, with weights on the host, such as
            `lambda model, x: (streaming.to_host(model), x)`. If no candidate fits, they are tried again with
            these; the table says whether the transfers hide behind compute at the target's peak, or how fast
            the link lets the step be (see `TimeBound`). It is traced, not run.
        tokens_per_step: of one call on all devices, to give that in tokens per second.
        **kwargs: its keyword arguments.

    Returns:
        The plan. No candidate beyond the first that fits is compiled.

    Raises:
        BudgetError: no candidate fits; shows all of them and the smallest.
        ValueError: a budget that cannot be read, no candidates, or fewer layers or tokens than one.
        TypeError: `layers` or `tokens_per_step` is not an integer, or `streamed` does not return one result
            for each argument.
        TargetError: as `report`, for arguments on the host.

    Cost: one compilation per candidate, with `streamed` at most two. With `layers` two to `4 + log2(layers)`
    more, at most twice that for a nested candidate.
    """
    limit, host_limit = parse_bytes(budget), None if host_budget is None else parse_bytes(host_budget)
    _check_count("layers", layers, "the number of layers of the stack")
    _check_count("tokens_per_step", tokens_per_step, _TOKENS)
    if not candidates:
        raise ValueError("plan needs at least one candidate policy; got none")
    attempt = _attempts(fn_of_policy, args, kwargs, target, donate, streamed)
    search = _Search(attempt, limit, host_limit, tokens_per_step)
    chosen = search.first_to_fit(candidates)
    if chosen is None and streamed is not None:
        chosen = search.first_to_fit(candidates, streamed=True)
    if chosen is None:
        leaves = jax.tree.leaves((args, kwargs))
        on_host = streamed is not None or any(host_memory_kind(leaf) is not None for leaf in leaves)
        raise BudgetError(_nothing_fits(search.tried, limit, host_limit, on_host))
    if layers is not None:
        chosen = search.with_most_first_layers(chosen, layers)
    assert chosen.report is not None
    return Plan(chosen.policy, chosen.report, search.tried, limit, chosen.streamed)


_TOKENS = "the number of tokens of one call on all devices"


def _check_count(name: str, count: Any, what: str) -> None:
    if count is None:
        return
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(f"{name} is {what} (an int), or None; got {count!r}")
    if count < 1:
        raise ValueError(f"{name} is {what}, at least 1, or None; got {count}")


class _Search:
    """Compiles policies, remembers their reports in order, and compares them with a budget."""

    def __init__(self, attempt: "_Attempt", limit: int, host_limit: int | None, tokens: int | None):
        self._attempt, self._limit, self._host_limit, self._tokens = attempt, limit, host_limit, tokens
        self._trials: list[Trial] = []

    @property
    def tried(self) -> Comparison:
        return Comparison(tuple(self._trials), self._tokens)

    def _try(self, policy: ScanCheckpointSpec, streamed: bool) -> Trial:
        self._trials.append(self._attempt(policy, streamed))
        return self._trials[-1]

    def _fits(self, trial: Trial) -> bool:
        found = trial.report
        return (
            found is not None
            and found.total <= self._limit
            and (self._host_limit is None or found.host.total <= self._host_limit)
        )

    def first_to_fit(self, candidates: Sequence[ScanCheckpointSpec], streamed: bool = False) -> Trial | None:
        for policy in candidates:
            trial = self._try(policy, streamed)
            if self._fits(trial):
                return trial
            if trial.report is not None and trial.report.arguments > self._limit:
                break  # the arguments are the same under every policy
        return None

    def with_most_first_layers(self, chosen: Trial, layers: int) -> Trial:
        """Search for the `first_layers` that leave the least arithmetic."""
        base = resolve_policy(chosen.policy)
        if base.saves_everything:
            return chosen
        if base.first_layers:
            return self._most(chosen, base.first_policy, layers)
        if not base.is_nested:
            return self._most(chosen, base.save_carries == "offload", layers)
        carries = self._most(chosen, True, layers)
        kept = resolve_policy(carries.policy).first_layers
        if kept == 0:
            return chosen
        # Keeping a layer's internals saves two evaluations of it, keeping its carry saves one.
        fewest = self._with_first(chosen, False, kept // 2 + 1)
        if fewest is None or not self._fits(fewest):
            return carries
        return min(carries, self._most(fewest, False, layers), key=_arithmetic)

    def _with_first(self, trial: Trial, policy: ScanCheckpointSpec, count: int) -> Trial | None:
        """Compile with that many first layers; None if the policy cannot have any."""
        base = resolve_policy(trial.policy)
        try:
            other = dataclasses.replace(base, first_layers=count, first_policy=policy)
        except ValueError:
            return None
        return self._try(other, trial.streamed)

    def _most(self, fitting: Trial, policy: ScanCheckpointSpec, layers: int) -> Trial:
        """Search for the most first layers, from those of `fitting` on, by interpolation between trials."""
        keeps = resolve_policy(policy)
        alike = (trial for trial in self._trials if trial.streamed == fitting.streamed)
        best, beyond = fitting, next((t for t in alike if resolve_policy(t.policy) == keeps), None)
        low, high = resolve_policy(fitting.policy).first_layers, layers
        guesses = 0
        while high - low > 1:
            count = self._guess(best, beyond, low, high) if guesses < 4 else (low + high) // 2
            trial = self._with_first(best, policy, count)
            if trial is None:
                return fitting
            guesses += 1
            if self._fits(trial):
                low, best = count, trial
            else:
                high, beyond = count, trial
        return best

    def _guess(self, best: Trial, beyond: Trial | None, low: int, high: int) -> int:
        if beyond is None or beyond.report is None or best.report is None:
            return (low + high) // 2
        free, growth = self._limit - best.report.total, beyond.report.total - best.report.total
        share = free / growth if growth > 0 else 0.5
        return min(max(low + int(share * (high - low)), low + 1), high - 1)


_Attempt = Callable[[ScanCheckpointSpec, bool], Trial]  # from a policy and whether weights are on the host


def _attempts(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: str | Target,
    donate: str | Sequence[str],
    streamed: Callable[..., Sequence[PyTree]] | None,
) -> _Attempt:
    @functools.cache
    def arguments(on_host: bool) -> tuple[Any, ...]:
        return arguments_on_host(streamed, args) if streamed is not None and on_host else args

    def attempt(policy: ScanCheckpointSpec, on_host: bool) -> Trial:
        trial = _try(fn_of_policy, arguments(on_host), kwargs, policy, target, donate)
        return dataclasses.replace(trial, streamed=on_host)

    return attempt


def _try(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: ScanCheckpointSpec,
    target: str | Target,
    donate: str | Sequence[str],
) -> Trial:
    try:
        return Trial(policy, report(fn_of_policy(policy), *args, target=target, donate=donate, **kwargs))
    except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
        return Trial(policy, None, str(error).splitlines()[0])


def _name(policy: ScanCheckpointSpec, streamed: bool) -> str:
    return f"{policy!r}, streamed" if streamed else repr(policy)


def _arithmetic(trial: Trial) -> int:
    assert trial.report is not None
    return trial.report.flops.matmul


def _sizes(found: MemoryReport) -> tuple[int, ...]:
    """Bytes on the device, of temporaries, on the host, and of transfers."""
    moved = found.flops.bytes_from_host + found.flops.bytes_to_host
    return found.total, found.temporaries, found.host.total, moved


def _row(trial: Trial, unit: int, least: int, tokens: int | None) -> tuple[str, ...]:
    found = trial.report
    if found is None:
        return (trial.name, "refused", "", "", "", "", "", "")
    return (
        trial.name,
        *(f"{size / unit:.2f}" for size in _sizes(found)),
        _link(found, tokens),
        (f"{found.flops.matmul / least:.2f}" if least else "-") + ("" if found.flops.exact else " ?"),
        f"{found.compile_seconds:.1f}",
    )


def _link(found: MemoryReport, tokens: int | None) -> str:
    """What the link to the host allows, if it is what limits a call: tokens per second, or seconds."""
    least = found.least_time
    if least is None or not least.transfer:
        return "-"
    if least.hidden:
        return "hidden"
    return f"{least.transfer:.3g}" if tokens is None else readable_count(int(tokens / least.transfer))


def _nothing_fits(tried: Comparison, limit: int, host_limit: int | None, on_host: bool) -> str:
    compiled = [(trial.report, trial.name) for trial in tried.trials if trial.report is not None]
    found = [pair for pair in compiled if host_limit is None or pair[0].host.total <= host_limit]
    what = f"{readable_bytes(limit)} a device"
    if host_limit is not None:
        what += f" and {readable_bytes(host_limit)} on the host"
    if not compiled:
        return f"no candidate fits {what}: the compiler refused all of them\n{tried}"
    needs, smallest = min(found or compiled, key=lambda pair: pair[0].total)
    which = "" if host_limit is None or not found else " within the host's budget"
    of_host = "" if host_limit is None else f" and {readable_bytes(needs.host.total)} on the host"
    if needs.arguments > limit:
        what += f": the arguments alone take {readable_bytes(needs.arguments)} under every policy"
    return (
        f"no candidate fits {what}. The smallest found{which} is {smallest} with "
        f"{readable_bytes(needs.total)} a device{of_host}. Shorten the context, shard over more devices, "
        f"freeze weights, {'' if on_host else 'keep weights on the host, '}or allow the host more memory."
        f"\n{tried}"
    )
