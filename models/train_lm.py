"""Trains a language model from a config file.

    python -m models.train_lm --config_path my-model.yaml [--trainer.num_steps 500 ...]

Leaves the resolved config, metrics and checkpoints in the run folder. The same command
resumes a run that was stopped or killed, if `trainer.run_dir` names its folder. With
`--show_example` it prints the first example of each source and its targets, and trains
nothing; without arguments it says what the defaults would train.
"""

import contextlib
import functools
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.text import Text

from models.candidate import STREAMED, Candidate
from models.command import backend_lines, encodable, escaped, run_command, shown_on
from models.hf_io.formats import why_not_exported
from models.lm import next_token_loss
from models.loading import tokenizer_remark
from models.run_config import LmRunConfig, find_model
from models.run_scoring import (
    check_backends,
    check_scoring,
    run_scoring,
    scored_against,
)
from models.run_state import (
    check_weights,
    initial_state,
    saved_arrays,
    state_shapes,
)
from stacked_remat import check_offload, streaming
from stacked_remat.lora import dequantize_linears
from stacked_remat.memory import readable_bytes
from stacked_remat.ops import backends_taken
from stacked_remat.training import (
    EXIT_INTERRUPTED,
    Checkpoints,
    ConfigError,
    ConsoleProgress,
    DataError,
    JsonLinesTracker,
    Partitioning,
    Position,
    RunFolder,
    RunOutputs,
    StopSignals,
    Tokenizer,
    Tracker,
    TrainingResult,
    TrainState,
    build_trackers,
    check_trackers,
    first_examples,
    held_out_evaluators,
    learning_rate_schedule,
    load_tokenizer,
    lock_run_folder,
    open_training_data,
    parse_config,
    tokenize_share,
    train,
)
from stacked_remat.training.checkpoint import checkpoint_steps
from stacked_remat.training.local_checkpoints import (
    LocalFiles,
    check_not_left,
    forget,
)
from stacked_remat.training.processes import (
    LargestOfAll,
    agreed,
    end_after_error,
    end_process,
    ending_with_others,
    in_turn,
    of_all,
    start_processes,
)
from stacked_remat.training.remat import remat_lines
from stacked_remat.training.run_folder import check_same_in_all
from stacked_remat.training.stage_rows import remove_stage_rows
from stacked_remat.training.throughput import peak_memory_bytes

_SHOW_EXAMPLE = "--show_example"
_MOST_SHOWN = 2000  # characters of a run of targets, or of other tokens


def train_lm(
    config: LmRunConfig, progress: ConsoleProgress, stop: StopSignals
) -> TrainingResult:
    """Runs the training that `config` describes, from the last checkpoint in its run
    folder if there is one.

    After the first step, a signal that `stop` receives ends the run between two steps,
    with a checkpoint.
    """
    step, tokenizer = _prepared_in_all(config, progress)
    config = step.config
    partitioning = step.partitioning
    if jax.process_count() > 1:
        agreed(lambda: tokenize_share(config.data, tokenizer, progress))
    data = in_turn(
        lambda: open_training_data(
            config.data,
            tokenizer,
            seed=config.trainer.seed,
            progress=progress,
            process=partitioning.process_share(config.data.batch_size),
        )
    )
    evaluators = held_out_evaluators(
        step.train_step.evaluated(next_token_loss),
        data.held_out,
        data.held_out_by_source,
        config.trainer.eval_batches,
        partitioning=partitioning,
    )
    validation = scored_against(config, data, partitioning)
    with contextlib.ExitStack() as closing:
        closing.callback(data.training.close)
        folder = _run_folder(config, closing)
        # From here on arrays are divided as the run's mappings say.
        closing.enter_context(partitioning.active())
        checkpoints = Checkpoints(
            folder.checkpoints,
            config.trainer.checkpoint,
            run_config=config.entries,
            saved=saved_arrays,
            written=functools.partial(remove_stage_rows, partitioning=partitioning),
            local=in_turn(lambda: _local_files(config, folder)),
            report=progress.message,
        )
        closing.callback(checkpoints.close)
        state, position = _first_state(config, partitioning, checkpoints)
        if position is not None:
            # Refuses other data while the folder is still as it was
            data.training.set_state(position.data)
            progress.message(
                f"resuming after step {position.step} of an earlier process"
            )
        trackers = _trackers(config, folder, position, closing)
        done = position.step if position else 0
        scoring = run_scoring(config, data, validation, tokenizer, folder, done)
        if jax.process_index() == 0:
            folder.begin(config.entries)
        progress.message(_summary(config, data.summary, state, folder))
        closing.enter_context(ending_with_others())
        # A resumed run reports its own steps alone.
        began = time.monotonic()
        first = int(state.step)
        result = train(
            state,
            step.train_step,
            schedule=learning_rate_schedule(config.optimizer, config.trainer.num_steps),
            training=data.training,
            evaluators=evaluators,
            config=config.trainer,
            outputs=RunOutputs(folder, checkpoints, trackers, progress),
            position=position,
            should_stop=_asked_to_stop(stop),
            scoring=scoring,
        )
    progress.message(_conclude(config, result, folder, first, time.monotonic() - began))
    return result


def main(arguments: Sequence[str]) -> int:
    """The command.

    Returns:
        0 when the run is finished, 1 after an error, 75 when a signal ended it: the
            same command resumes it.
    """
    connected = ended_together = False

    def run(arguments: Sequence[str], stop: StopSignals) -> int:
        nonlocal connected, ended_together
        is_shown = _SHOW_EXAMPLE in arguments
        if not arguments:
            _show_defaults(Console())
            return 0
        arguments = [given for given in arguments if given != _SHOW_EXAMPLE]
        config = parse_config(LmRunConfig, arguments)
        if is_shown:
            _show_examples(config.resolved(), Console())
            return 0
        start_processes(config.distributed)
        connected = jax.distributed.is_initialized()
        progress = ConsoleProgress(
            None if jax.process_index() == 0 else Console(quiet=True)
        )
        with ending_with_others():
            result = train_lm(config, progress, stop)
        ended_together = True
        return 0 if result.stopped_by is None else EXIT_INTERRUPTED

    early = (
        " before a step was done; the same command starts again, from the last"
        " checkpoint if there is one"
    )
    try:
        status = run_command(
            run,
            arguments,
            ConsoleProgress().message,
            interrupted=(EXIT_INTERRUPTED, early),
        )
    except Exception:
        if not connected:
            raise
        traceback.print_exc()
        status = 1
    if connected and status == 1:
        end_after_error(status)
    if not ended_together and jax.distributed.is_initialized():
        # At its own end JAX would wait for the others, and they for this process
        end_process(status)
    return status


def _show_defaults(console: Console) -> None:
    """Says what the defaults train, and how to begin that or another run."""
    config = LmRunConfig().resolved()
    model = config.model
    sources = ", ".join(config.data.sources) or "Python's standard library"
    tokens = config.data.batch_size * config.data.seq_len
    shown_on(console)(
        "Without arguments nothing is trained. The defaults would train\n"
        f"  model   {type(model).__name__} of {model.num_layers} layers, with random"
        " weights\n"
        f"  data    {sources}, tokenizer {tokenizer_remark(config)}\n"
        f"  steps   {config.trainer.num_steps} of {tokens:,} tokens\n"
        "To train that, or a config of yours (docs/train-your-model.md):\n"
        f"  python -m models.train_lm --trainer.num_steps {config.trainer.num_steps}\n"
        "  python -m models.train_lm --config_path my-model.yaml\n"
        "--help shows what keys there are."
    )


def _show_examples(config: LmRunConfig, console: Console) -> None:
    """Prints the first example of each source, with its targets in green and between
    marks.

    Raises:
        DataError: the first records of a source have no target.
    """
    tokenizer = load_tokenizer(
        config.tokenizer_name, config.data.chat_date, rows=config.vocab_size
    )
    show = shown_on(console)
    without = {*config.data.sources}
    for example in first_examples(config.data, tokenizer):
        if example.num_targets:
            without -= {example.source}
        text = Text()
        for run, is_target in example.runs:
            cut = run if len(run) <= _MOST_SHOWN else f"{run[:_MOST_SHOWN]}..."
            marked = f"«{cut}»" if is_target else cut
            text.append(
                encodable(escaped(marked), console),
                style="bold green" if is_target else "dim",
            )
        title = f"{example}\ntargets are green, between « and »:"
        console.print(
            encodable(escaped(title), console),
            style="bold",
            markup=False,
            soft_wrap=True,
        )
        console.print(text, soft_wrap=True)
        lines = [*example.remarks]
        positions = example.num_tokens - 1
        if config.data.packing == "whole" and positions > config.data.seq_len:
            lines.append(
                f"this example is longer than data.seq_len = {config.data.seq_len} and"
                " is cut into parts that do not see each other; data.seq_len:"
                f" {positions} would not cut it"
            )
        for line in lines:
            show(escaped(line))
    if without:
        raise DataError(
            f"data.sources.{min(without)} has no target in its first records. With"
            " train_on: answers, targets are the turns of the role `assistant`, and"
            " completions."
        )


def _asked_to_stop(stop: StopSignals) -> Callable[[], str | None]:
    """A function that says which signal asks to stop, if one came; from its first call
    on, none raises.
    """
    largest = LargestOfAll()

    def asked() -> str | None:
        stop.defer()
        number = largest(
            0 if stop.received is None else int(signal.Signals[stop.received])
        )
        return signal.Signals(number).name if number else None

    return asked


def _first_state(
    config: LmRunConfig, partitioning: Partitioning, checkpoints: Checkpoints
) -> tuple[TrainState, Position | None]:
    """The state and position of the latest checkpoint, or a new state."""
    # Processes must agree, or some would wait for the others in a collective.
    if of_all(checkpoints.latest() is None)[0]:
        checkpoints.begin()
        return initial_state(config, partitioning), None
    # Frozen weights are in no checkpoint.
    # Adapters are on weights that are made or read again, as at the beginning.
    make = state_shapes if config.lora is None else initial_state
    state, saved = checkpoints.restore(make(config, partitioning))
    position = Position(**saved)
    if position.step > config.trainer.num_steps:
        raise ConfigError(
            f"trainer.num_steps = {config.trainer.num_steps}, and the run in"
            f" {checkpoints.folder.parent} has done {position.step} steps. Ask for"
            " more, or give this run a folder of its own with --trainer.run_dir."
        )
    return state, position


def _local_files(config: LmRunConfig, folder: RunFolder) -> LocalFiles | None:
    """The local checkpoints of this process, if the config asks for some."""
    given = config.trainer.checkpoint.local_dir
    parent = None if given is None else Path(given).expanduser()
    if jax.process_index() == 0:
        last = max(checkpoint_steps(folder.checkpoints), default=-1)
        check_not_left(folder.local_id, parent, last)
        # A later process must not resume from those of an earlier one.
        if parent is None:
            forget(folder.local_id)
    return None if parent is None else LocalFiles(folder.local_id, parent)


def _run_folder(config: LmRunConfig, closing: contextlib.ExitStack) -> RunFolder:
    """The folder of the run, for this process alone until `closing` ends."""
    given = config.trainer.run_dir
    # Of the first process, so that all have one folder
    now = time.strftime("%Y%m%d-%H%M%S", time.localtime(of_all(time.time())[0]))
    root = Path(f"runs/{now}" if given is None else given).expanduser()

    def opened() -> RunFolder:
        is_first = jax.process_index() == 0
        if is_first:
            closing.enter_context(lock_run_folder(root))
        elif not root.is_dir():
            raise ConfigError(
                f"process {jax.process_index()} does not see the run folder that"
                f" process 0 made; in this process it is {root.absolute()}. All"
                " processes must see one folder: give --trainer.run_dir an absolute"
                " path on a file system that all hosts share."
            )
        return RunFolder.open(
            root,
            config.entries,
            overwrite=config.trainer.checkpoint.overwrite and is_first,
            accept_changes=config.trainer.checkpoint.accept_changes,
        )

    return in_turn(opened)


def _prepared_in_all(
    config: LmRunConfig, progress: ConsoleProgress
) -> tuple[Candidate, Tokenizer]:
    """`_prepared` in all processes; refuses configs that differ."""
    check_same_in_all(
        config.entries, "Start all with the same config file and arguments."
    )
    prepared = agreed(functools.partial(_prepared, config, progress))
    check_same_in_all(
        prepared[0].config.entries, "Write the policy as `remat`, in place of `auto`."
    )
    return prepared


def _prepared(
    config: LmRunConfig, progress: ConsoleProgress
) -> tuple[Candidate, Tokenizer]:
    """The step with its final model, policy and streaming, if it can fit and run
    here.
    """
    # What costs nothing to check comes first.
    check_trackers(config.trainer.trackers)
    check_scoring(config)
    Candidate(config).check_batch()
    resolved = config.resolved()
    _check_run(resolved)
    tokenizer = load_tokenizer(
        resolved.tokenizer_name, config.data.chat_date, rows=resolved.vocab_size
    )
    if resolved.policy is None:
        # Compiling policies takes minutes: a record that has no text is found before
        tokenize_share(resolved.data, tokenizer, progress)
    with backends_taken() as taken:
        step = _fitting(Candidate(resolved), progress)
        step.check_applies()
    check_backends(config, taken)
    for line in backend_lines(taken):
        progress.message(line)
    rows = step.config.vocab_size
    if (reason := why_not_exported(step.config.model, rows)) is not None:
        progress.message(f"models.export_hf will refuse this model: {reason}")
    if step.policy.offloads:
        check_offload()
    return step, tokenizer


def _check_run(config: LmRunConfig) -> None:
    """Raises for a run folder that can't be taken and for weights to begin with that
    are not there: before policies are compiled and text is tokenized.
    """
    given = config.trainer.run_dir
    resumes = False
    if given is not None:
        folder = RunFolder(Path(given).expanduser())
        overwrite = config.trainer.checkpoint.overwrite
        folder.check(
            config.entries,
            overwrite=overwrite,
            accept_changes=config.trainer.checkpoint.accept_changes,
        )
        resumes = folder.config.exists() and not overwrite
    # A checkpoint has all weights but those under adapters.
    if config.initialize_from_hf is not None and (config.lora or not resumes):
        check_weights(find_model(config.initialize_from_hf))


def _fitting(step: Candidate, progress: ConsoleProgress) -> Candidate:
    """The step under the policy that fits the budget, if it has one."""
    config = step.config
    if config.policy is not None or config.budget is None:
        step.check()
        return step
    step.check(at_least=True)
    # Compiles several steps: say so before.
    progress.message(f"looking for the remat policy that fits {config.budget}")
    found = step.plan(
        budget=config.budget,
        host_budget=config.host_budget,
        begin=lambda name: progress.message(f"compiling {name}"),
    )
    progress.message(remat_lines(found.policy, streamed=found.streamed))
    progress.message(found.summary)
    try:
        fitting = step.having(STREAMED if found.streamed else {}, found.policy)
    except ValueError as error:  # of a policy that trainer.streaming does not go with
        raise ConfigError(f"remat: auto found {found.policy!r}. {error}") from error
    if found.streamed:
        fitting.check()  # the memory of this host
    return fitting


def _trackers(
    config: LmRunConfig,
    folder: RunFolder,
    position: Position | None,
    closing: contextlib.ExitStack,
) -> list[Tracker]:
    if jax.process_index() != 0:
        return []
    done = position and position.step
    more = build_trackers(
        config.trainer.trackers, folder.root, config.entries, resumed_after=done
    )
    # Rows after the checkpoint are of steps that are done again.
    trackers = [
        JsonLinesTracker(folder.metrics, resumed_after=-1 if done is None else done),
        *more,
    ]
    for tracker in trackers:
        closing.callback(tracker.close)
    return trackers


def _conclude(
    config: LmRunConfig,
    result: TrainingResult,
    folder: RunFolder,
    first: int,
    seconds: float,
) -> str:
    """What this process did from step `first` on, how the losses changed, and the
    commands that come next.
    """
    if result.stopped_by is not None:
        return (
            f"stopped by {result.stopped_by} after step {int(result.state.step)}; the"
            f" same command with --trainer.run_dir {folder.root} resumes it"
        )
    done = int(result.state.step)
    asked = config.trainer.by_held_out_loss
    outcome = {
        "held_out_before": result.held_out_before,
        "held_out_after": result.held_out_after,
    }
    if asked:
        outcome |= {"best_step": result.best_step, "best_held_out": result.best_loss}
    if jax.process_index() == 0:
        folder.finish(outcome)
    steps = done - first
    step_tokens = config.data.batch_size * config.data.seq_len
    minutes, rest = divmod(round(seconds), 60)
    peak = peak_memory_bytes()
    used = [] if peak is None else [f"peak memory {readable_bytes(peak)}"]
    losses = [
        f"{name.replace('held_out', 'held-out', 1)} loss"
        f" {result.held_out_before[name]:.4f} -> {after:.4f}"
        for name, after in result.held_out_after.items()
        # A run resumed with accept_changes may have other sources
        if name in result.held_out_before
    ]
    if done < config.trainer.num_steps:
        losses.append(
            f"ended after step {done}, since {config.trainer.patience} evaluations"
            " found no lower held-out loss"
        )
    which = ""
    if asked and result.best_loss is not None:
        source = config.trainer.best_source
        of_source = "" if source is None else f" of {source}"
        losses.append(
            f"lowest held-out loss{of_source} {result.best_loss:.4f}, after step"
            f" {result.best_step}"
        )
        if config.trainer.checkpoint.keep_best:
            which = f" --step {result.best_step}"
    own = Path(sys.executable)
    python = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else "python"
    return "\n".join(
        [
            (
                f"{steps:,} steps of {step_tokens:,} tokens in {minutes}:{rest:02} with"
                " compiling and evaluation"
            ),
            *used,
            *losses,
            f"checkpoints, config and metrics are in {folder.root}",
            (
                f"  {python} -m models.generate --run_dir {folder.root}{which} --prompt"
                " TEXT"
            ),
        ]
    )


def _is_inexact(leaf: Any) -> bool:
    """Whether an array, or its shape, is of floating-point numbers."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _summary(
    config: LmRunConfig, text: str, state: TrainState, folder: RunFolder
) -> str:
    def whole(model: Any) -> Any:
        # Codes of weights in 4 bits are half as many as the weights, and those in files
        # have one number a layer.
        return streaming.in_memory(dequantize_linears(model))

    weights = eqx.filter_eval_shape(whole, state.model)
    parameters, trained = (
        sum(leaf.size for leaf in jax.tree.leaves(tree) if _is_inexact(leaf))
        for tree in (weights, state.trained)
    )
    some = "" if parameters == trained else f", {trained:,} of them trained"
    step_tokens = config.data.batch_size * config.data.seq_len
    return (
        f"{parameters:,} parameters{some}; {len(state.step.devices())}"
        f" {jax.default_backend()} device(s)\n{text}; tokenizer"
        f" {tokenizer_remark(config)}\n{config.trainer.num_steps} steps of"
        f" {step_tokens:,} tokens; run folder {folder.root}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
