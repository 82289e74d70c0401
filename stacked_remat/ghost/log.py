"""The scores of a run's training examples in Parquet files: written whole, resumed
without duplicates.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import jax
import numpy as np

from .._files import replaced_whole
from .._scan.marks import is_named, raw_array
from ._grad_dot import GradDots

LOG_FOLDER = "ghost"
"""The name of the log's folder in a run folder."""

_PATTERN = "scores-from-*.parquet"
_ROWS = 2**18  # of a shard; about 3 MiB


class ScoreLogError(ValueError):
    """A log can't be read or written; says why and what to do."""


def import_pyarrow() -> Any:
    """The package, which is optional."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.dataset
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "Scores are logged to Parquet, which needs pyarrow: pip install"
            " 'stacked_remat[data]'."
        ) from error
    return pyarrow


class TokenScores(NamedTuple):
    """The scores of an example's tokens.

    Attributes:
        scores: of each token of the text as a target, `[tokens]`; zero for one that is
            no target.
        ends: where each token ends in the text, in characters.
    """

    scores: np.ndarray
    ends: np.ndarray


@final
@dataclass(frozen=True)
class StepScores:
    """The scores of one step's examples, in arrays of the host.

    Attributes:
        step: number of the step, from 1.
        examples: the id of each example; the same example has the same id in every
            step.
        losses: loss of each example, `[batch]`.
        scores: for each leaf's path, `[batch]`, or `[layers, batch]` for leaves of a
            stack of layers.
        norms: norms of the examples' gradients, as `scores`; None if they were not
            computed.
        texts: what to show of each example; None for nothing.
        places: the file and line of each example; None if they are not known.
        tokens: of each example; None without scores of tokens.

    Raises:
        ValueError: a shape does not fit the number of examples; names the path.
    """

    step: int
    examples: Sequence[str]
    losses: np.ndarray
    scores: Mapping[str, np.ndarray]
    norms: Mapping[str, np.ndarray] | None = None
    texts: Sequence[str] | None = None
    places: Sequence[str] | None = None
    tokens: Sequence[TokenScores] | None = None

    @staticmethod
    def of(
        found: GradDots, losses: Any, step: int, examples: Sequence[Any], **more: Any
    ) -> "StepScores":
        """What `grad_dot` found, and the losses of the examples, named or plain;
        `more` are `texts`, `places` and `tokens`.
        """
        # Of another granularity than "leaf" there are totals alone.
        scores = found.scores or {"model": found.total}
        norms = None
        if found.total_norm is not None:
            norms = found.norms or {"model": found.total_norm}
        losses, scores, norms = jax.tree.map(
            lambda leaf: np.asarray(raw_array(leaf)),
            (losses, scores, norms),
            is_leaf=is_named,
        )
        return StepScores(step, [*map(str, examples)], losses, scores, norms, **more)

    def __post_init__(self) -> None:
        count = len(self.examples)
        if self.step < 1 or not self.scores:
            raise ValueError(
                f"Step {self.step} with scores of {[*self.scores]}: steps are from 1,"
                " with scores."
            )
        for name in ("texts", "places", "tokens"):
            of_examples = getattr(self, name)
            if of_examples is not None and len(of_examples) != count:
                raise ValueError(
                    f"There are {len(of_examples)} {name} of {count} examples."
                )
        for tokens in self.tokens or ():
            if np.shape(tokens.scores) != np.shape(tokens.ends):
                raise ValueError(
                    f"tokens have {np.size(tokens.scores)} scores and"
                    f" {np.size(tokens.ends)} ends of one example."
                )
        arrays = {"losses": self.losses}
        arrays |= {f"scores[{path!r}]": array for path, array in self.scores.items()}
        for path, array in ({} if self.norms is None else self.norms).items():
            if path not in self.scores or np.shape(self.scores[path]) != np.shape(
                array
            ):
                raise ValueError(
                    f"norms[{path!r}] has the shape {np.shape(array)}, unlike its"
                    " scores."
                )
        for name, array in arrays.items():
            if (
                not 1 <= np.ndim(array) <= (1 if name == "losses" else 2)
                or np.shape(array)[-1] != count
            ):
                raise ValueError(
                    f"{name} has the shape {np.shape(array)}, and there are {count}"
                    " examples: the last axis is that of the examples, and one of"
                    " layers may be before it."
                )


@final
@dataclass
class ScoreLog:
    """Writes scores to Parquet files in a folder: a row for each step, example, leaf
    and layer.

    The columns are `step`, `example` (its id), `layer` (null for leaves outside of
    stacks), `leaf` (its path), `score`, `norm` (null if not computed), `loss` (of the
    example), `text`, `place` (its files and lines), `token_scores` and `token_ends`
    (lists, as of `TokenScores`; null without scores of tokens). An example's score in a
    step is the sum of its rows.

    A file appears whole or not at all, with the first of its steps in its name, so a
    process may be killed at any moment. A run that resumes after step s drops the rows
    of later steps, and writes them again.

    Args:
        folder: of the files; made if needed.
        resumed_after: the step after which the run resumes; 0 drops all rows. None for
            a folder without rows.

    Raises:
        ImportError: pyarrow is not installed.
        ScoreLogError: the folder has rows and `resumed_after` is not given, or a file
            is damaged.

    Cost: rows of up to 2**18 scores in memory between two files.
    """

    folder: Path
    resumed_after: int | None = None
    _tables: list[Any] = field(default_factory=list, init=False, repr=False)
    _first: int = field(default=0, init=False, repr=False)
    _last: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        pyarrow = import_pyarrow()
        self.folder = Path(self.folder)  # the text of a path does too
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.resumed_after is None:
            if shards := _shards(self.folder):
                raise ScoreLogError(
                    f"{self.folder} has scores of an earlier run ({shards[0].name})."
                    " Give resumed_after, the step after which the run resumes, or"
                    " another folder."
                )
            return
        self._last = self.resumed_after
        for shard in _shards(self.folder):
            # A file that begins later has rows of later steps alone; one before may
            # have both.
            if (
                int(shard.stem.rpartition("-")[2]) > self.resumed_after
            ):  # its first step
                shard.unlink()
            else:
                with _named(shard):
                    table = pyarrow.parquet.read_table(shard, schema=_schema())
                kept = table.filter(pyarrow.compute.field("step") <= self.resumed_after)
                if kept.num_rows < table.num_rows:
                    _write(kept, shard)

    def append(self, found: StepScores) -> None:
        """Adds the rows of a step; they are in a file after the next `flush`, or when
        there are many.

        Raises:
            ValueError: the step is not after those that were added before.
        """
        if found.step <= self._last:
            raise ValueError(
                f"Scores of step {found.step} come after those of step {self._last}:"
                " each step is logged once, in order. Give"
                f" resumed_after={found.step - 1} to log it again."
            )
        self._first = self._first or found.step
        self._last = found.step
        self._tables.append(_table(found))
        # A run that saves seldom must not keep all its scores in memory.
        if sum(table.num_rows for table in self._tables) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes the rows that are in memory, if there are any, to a file."""
        if not self._tables:
            return
        pyarrow = import_pyarrow()
        # Each step has a dictionary of its own ids and texts; a Parquet file has one.
        whole = pyarrow.concat_tables(self._tables).unify_dictionaries()
        _write(whole, self.folder / f"scores-from-{self._first:012}.parquet")
        self._tables = []
        self._first = 0


def log_folder(run: Path) -> Path:
    """The folder of a run's log: `ghost/` of a run folder, or the folder itself."""
    if not run.is_dir():
        raise FileNotFoundError(
            f"There is no folder {run}. Name that of the run (trainer.run_dir), or of a"
            " log."
        )
    for folder in (run / LOG_FOLDER, run):
        if _shards(folder):
            return folder
    raise ScoreLogError(
        f"{run} has no scores of examples. Train with a `ghost` section in the config,"
        " such as ghost: {every: 10}, and let it reach step `every`."
    )


def read_scores(
    folder: Path,
    columns: Sequence[str],
    *,
    steps: tuple[int, int] | None = None,
    layer: int | None = None,
    leaves: Iterable[str] | None = None,
    examples: Iterable[str] | None = None,
) -> Any:
    """Some columns and rows of a log, as a `pyarrow.Table`; all rows of what is not
    given.

    `steps` are the first and the last one, `layer` a number, `leaves` paths, and
    `examples` ids.

    Raises:
        ScoreLogError: a file is damaged; names it.
    """
    pyarrow = import_pyarrow()
    column = pyarrow.compute.field
    wanted = pyarrow.compute.scalar(True)
    if steps is not None:
        wanted = wanted & (column("step") >= steps[0]) & (column("step") <= steps[1])
    if layer is not None:
        wanted = wanted & (column("layer") == layer)
    for name, values in (("leaf", leaves), ("example", examples)):
        if values is not None:
            wanted = wanted & column(name).cast("string").isin(list(values))
    tables = []
    for shard in _shards(folder):
        with _named(shard):
            # Not one dataset of all files: an error then names the file.
            rows = pyarrow.dataset.dataset(shard, format="parquet", schema=_schema())
            tables.append(rows.to_table(columns=list(columns), filter=wanted))
    return pyarrow.concat_tables(tables).unify_dictionaries().combine_chunks()


def _table(found: StepScores) -> Any:
    """The rows of a step."""
    pyarrow = import_pyarrow()
    count = len(found.examples)
    unknown = [""] * count
    texts = unknown if found.texts is None else found.texts
    places = unknown if found.places is None else found.places

    def rows(path: str) -> Any:
        scores = found.scores[path]
        norms = (found.norms or {}).get(path)
        layers = np.size(scores) // count
        at = np.tile(np.arange(count, dtype=np.int32), layers)
        numbers = np.repeat(np.arange(layers), count)

        def chosen(values: Sequence[str]) -> Any:
            return pyarrow.DictionaryArray.from_arrays(
                at, pyarrow.array(values, "string")
            )

        columns = {
            "step": np.full(at.size, found.step),
            "example": chosen(found.examples),
            "layer": numbers if np.ndim(scores) == 2 else pyarrow.nulls(at.size),
            "leaf": pyarrow.repeat(path, at.size).dictionary_encode(),
            "score": np.ravel(scores),
            "norm": pyarrow.nulls(at.size) if norms is None else np.ravel(norms),
            "loss": np.asarray(found.losses)[at],
            "text": chosen(texts),
            "place": chosen(places),
            **_token_columns(found.tokens, at),
        }
        return pyarrow.table(columns).cast(_schema())

    return pyarrow.concat_tables(map(rows, found.scores))


def _token_columns(
    tokens: Sequence[TokenScores] | None, at: np.ndarray
) -> dict[str, Any]:
    """The lists of rows that are of these examples."""
    pyarrow = import_pyarrow()
    if tokens is None:
        return dict.fromkeys(("token_scores", "token_ends"), pyarrow.nulls(at.size))
    of_rows = [tokens[example] for example in at]
    return {
        "token_scores": pyarrow.array([one.scores for one in of_rows]),
        "token_ends": pyarrow.array([one.ends for one in of_rows]),
    }


def _schema() -> Any:
    pyarrow = import_pyarrow()
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    number = pyarrow.float32()
    kinds = {
        "step": pyarrow.int64(),
        "example": text,
        "layer": pyarrow.int32(),
        "leaf": text,
    }
    kinds |= {"score": number, "norm": number, "loss": number}
    kinds |= {"text": text, "place": text}
    kinds |= {
        "token_scores": pyarrow.list_(number),
        "token_ends": pyarrow.list_(pyarrow.int32()),
    }
    return pyarrow.schema(list(kinds.items()))


def _write(table: Any, path: Path) -> None:
    with replaced_whole(path) as unfinished:
        import_pyarrow().parquet.write_table(table, unfinished, compression="zstd")


@contextlib.contextmanager
def _named(shard: Path) -> Iterator[None]:
    """Turns what pyarrow raises for a file into an error that names it."""
    try:
        yield
    except (import_pyarrow().ArrowException, OSError) as error:
        raise ScoreLogError(
            f"{shard} can't be read as a log of scores ({str(error).splitlines()[0]})."
            " Delete it to read the rest."
        ) from error


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob(_PATTERN))
