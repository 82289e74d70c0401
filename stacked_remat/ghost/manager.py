"""Scores for a training loop of one's own, with the methods that ghost engines of PyTorch have."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

import equinox as eqx
import numpy as np
from haliax import NamedArray

from ._by_example import check_examples
from ._grad_dot import GradDots, grad_dot, val_direction
from ._losses import Objective
from .log import ScoreLog, StepScores

PerExampleLoss: TypeAlias = Callable[[Any, Any], NamedArray]
"""From (model, batch) to the loss of each example, `[batch]`, or with the option `tokens` of each token."""

_OPTIONS = ("granularity", "norms", "check", "trainable", "tokens")


@final
@dataclass
class GhostManager:
    """Scores the examples of a training loop against a validation batch.

    A thin layer over `val_direction` and `grad_dot`, which compute everything; it holds only the attached
    batch and what was found for it. The methods have the names of the manager of GhostSuite (PyTorch), so
    that a loop can be ported line by line:

    ```python
    for step, (batch, ids) in enumerate(batches, 1):
        manager.attach_train_batch(batch, step=step, examples=ids)
        gradients = manager.prepare_gradients(model, manager.prepare_forward_input())
        manager.aggregate_and_log()
        updates, state = optimizer.update(gradients, state, model)
        model = eqx.apply_updates(model, updates)
        manager.clear_gradients()
        if manager.should_save_metrics(step):
            manager.save_metrics()
    manager.cleanup()
    ```

    Args:
        losses: the loss of each example, `[batch]`; with the option `tokens` of each token.
        validation: the batch whose loss the scores are about, as `losses` takes it.
        log: receives the scores; None to use only what `aggregate_and_log` returns.
        method: `grad_dot`.
        reduction: whether the loss is the `mean` or the `sum` of the examples' losses.
        every: steps between scored ones; the others compute only gradients.
        save_every: steps between files of the log.
        options: more arguments of `grad_dot`: `granularity`, `norms`, `check`, `trainable`, `tokens`.

    Raises:
        ValueError: the method is unknown, a number of steps is not positive, or options have others.
    """

    losses: PerExampleLoss
    validation: Any
    log: ScoreLog | None = None
    method: Literal["grad_dot"] = "grad_dot"
    reduction: Literal["mean", "sum"] = "mean"
    every: int = 1
    save_every: int = 100
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method != "grad_dot":
            raise ValueError(f"method must be 'grad_dot', got {self.method!r}.")
        for name in ("every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if strange := sorted(set(self.options) - set(_OPTIONS)):
            raise ValueError(
                f"options can't have {', '.join(strange)}: only {', '.join(_OPTIONS)}. Call grad_dot itself "
                "for the others."
            )
        self._attached: _Attached | None = None
        self._found: GradDots | None = None
        self._losses: Any = None
        self._is_detached = self._is_checked = False
        of_loss = {name: self.options[name] for name in ("trainable", "tokens") if name in self.options}
        gradient = functools.partial(
            val_direction, per_example_loss=self.losses, reduction=self.reduction, **of_loss
        )
        scored = functools.partial(
            _scored, gradient=gradient, losses=self.losses, reduction=self.reduction, options=self.options
        )
        self._scored = eqx.filter_jit(scored)
        self._plain = eqx.filter_jit(gradient)

    def attach_train_batch(
        self, batch: Any, *, step: int, examples: Sequence[Any], texts: Sequence[str] | None = None
    ) -> None:
        """Names the batch of the next step.

        In PyTorch it also moves the batch into the engine's hooks; here there are none.

        Args:
            batch: as `losses` takes it.
            step: number of the step, from 1.
            examples: an id for each example.
            texts: what the log shows of each example.
        """
        self._attached = _Attached(batch, step, [str(example) for example in examples], texts)
        self._found = None

    def prepare_forward_input(self) -> Any:
        """The batch to compute gradients of: the attached one.

        In PyTorch the validation batch is appended to it; here its gradient is a pass of its own, which is
        exact for weights that are used twice.
        """
        return self._required().batch

    def prepare_gradients(self, model: Any, batch: Any) -> Any:
        """The gradients of the reduced loss, and in a scored step the scores, for `aggregate_and_log`.

        In PyTorch it moves gradients that were set aside into `.grad`; here this is where everything is
        computed.

        Args:
            model: any tree; its floating-point arrays are differentiated.
            batch: what `prepare_forward_input` returned.

        Returns:
            A tree like the model, with None for what is not differentiated.

        Raises:
            ValueError: at the first scored step: the loss of an example depends on other examples.
        """
        if self._is_detached or self._required().step % self.every:
            return self._plain(model, val_batch=batch)
        if not self._is_checked and self.options.get("granularity") != "total":
            check_examples(model, self.losses, batch, tokens=self.options.get("tokens"))
            self._is_checked = True
        gradients, self._found, self._losses = self._scored(model, batch, self.validation)
        return gradients

    def aggregate_and_log(self) -> GradDots | None:
        """Appends the scores to the log, and returns what `grad_dot` found; None where nothing was scored."""
        attached, found = self._required(), self._found
        if found is None or self.log is None:
            return found
        scores = _plain_arrays(found.scores or {"model": found.total})  # of granularity="total"
        norms = None if found.norms is None else _plain_arrays(found.norms or {"model": found.total_norm})
        losses = np.asarray(self._losses)
        self.log.append(StepScores(attached.step, attached.examples, losses, scores, norms, attached.texts))
        return found

    def clear_gradients(self) -> None:
        """Forgets the attached batch and its scores; gradients are the caller's."""
        self._attached = self._found = self._losses = None

    def should_save_metrics(self, step: int) -> bool:
        """Whether `save_metrics` is due after this step."""
        return self.log is not None and step % self.save_every == 0

    def save_metrics(self) -> None:
        """Writes the rows that are in memory to a file of the log."""
        if self.log is not None:
            self.log.flush()

    def detach_for_evaluation(self) -> None:
        """Scores no steps until `reattach_after_evaluation`; a model can be evaluated without it too."""
        self._is_detached = True

    def reattach_after_evaluation(self) -> None:
        """Scores steps again."""
        self._is_detached = False

    def cleanup(self) -> None:
        """Writes what is left; in PyTorch it also removes the hooks."""
        self.clear_gradients()
        self.save_metrics()

    def _required(self) -> "_Attached":
        if self._attached is None:
            raise RuntimeError("There is no batch: call attach_train_batch before each step.")
        return self._attached


@dataclass(frozen=True)
class _Attached:
    batch: Any
    step: int
    examples: list[str]
    texts: Sequence[str] | None


def _scored(
    model: Any,
    batch: Any,
    validation: Any,
    *,
    gradient: Callable[..., Any],
    losses: PerExampleLoss,
    reduction: Any,
    options: dict[str, Any],
) -> tuple[Any, GradDots, Any]:
    """The gradients, what `grad_dot` found, and the losses of the examples."""
    direction = gradient(model, val_batch=validation)
    found = grad_dot(model, losses, batch, direction=direction, reduction=reduction, **options)
    return *found, Objective(reduction, options.get("tokens")).of_examples(losses(model, batch))


def _plain_arrays(named: dict[str, Any]) -> dict[str, np.ndarray]:
    """Named arrays `[batch]` or `[layers, batch]` on the host."""
    return {path: np.asarray(one.array) for path, one in named.items()}
