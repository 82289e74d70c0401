"""Scores for a training loop of one's own, with the methods that ghost engines of
PyTorch have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import equinox as eqx
import jax
import numpy as np

from .._scan.marks import is_named, raw_array
from ._by_example import check_examples
from ._grad_dot import GradDots, grad_dot, val_direction
from ._losses import Loss, Objective, Reduction
from .log import ScoreLog, StepScores

_OPTIONS = ("granularity", "norms", "check", "trainable", "tokens")


@final
@dataclass
class GhostManager:
    """Scores the examples of a training loop against a validation batch.

    A thin layer over `val_direction` and `grad_dot`, which compute everything; it holds
    only the attached batch and what was found for it. The methods have the names of the
    manager of GhostSuite (PyTorch), so that a loop can be ported line by line:

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
        losses: the loss of each example, `[batch]`; with the option `tokens` of each
            token.
        validation: the batch whose loss the scores are about, as `losses` takes it.
        log: receives the scores; None to use only what `aggregate_and_log` returns.
        reduction: whether the loss is the `mean` or the `sum` of the examples' losses.
        every: steps between scored ones; the others compute only gradients.
        save_every: steps between files of the log.
        options: more arguments of `grad_dot`: `granularity`, `norms`, `check`,
            `trainable`, `tokens`.

    Raises:
        ValueError: a number of steps is not positive, or options have others.
    """

    losses: Loss
    validation: Any
    log: ScoreLog | None = None
    reduction: Reduction = "mean"
    every: int = 1
    save_every: int = 100
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}."
                )
        if strange := sorted(set(self.options) - set(_OPTIONS)):
            raise ValueError(
                f"options can't have {', '.join(strange)}: only {', '.join(_OPTIONS)}."
                " Call grad_dot itself for the others."
            )
        self._attached: tuple[Any, int, list[str], Sequence[str] | None] | None = None
        self._found: tuple[GradDots, Any] | None = None
        self._is_checked = False
        # Two programs, so that a step that isn't scored pays for nothing of it.
        self._scored, self._plain = (
            eqx.filter_jit(self._score),
            eqx.filter_jit(self._gradient),
        )

    def attach_train_batch(
        self,
        batch: Any,
        *,
        step: int,
        examples: Sequence[Any],
        texts: Sequence[str] | None = None,
    ) -> None:
        """Names the batch of the next step.

        Args:
            batch: as `losses` takes it.
            step: number of the step, from 1.
            examples: an id for each example.
            texts: what the log shows of each example.
        """
        self._attached = (batch, step, [str(example) for example in examples], texts)
        self._found = None

    def prepare_forward_input(self) -> Any:
        """The attached batch. In PyTorch the validation batch is appended to it."""
        return self._required()[0]

    def prepare_gradients(self, model: Any, batch: Any) -> Any:
        """The gradients of the reduced loss, and in a scored step the scores, for
        `aggregate_and_log`.

        Args:
            model: any tree; its floating-point arrays are differentiated.
            batch: what `prepare_forward_input` returned.

        Returns:
            A tree like the model, with None for what is not differentiated.

        Raises:
            ValueError: at the first scored step: the loss of an example depends on
                other examples.
        """
        if self._required()[1] % self.every:
            return self._plain(model, batch)
        # Once: it costs two forward passes, and what a loss function computes doesn't
        # change from step to step.
        if not self._is_checked and self.options.get("granularity") != "total":
            check_examples(model, self.losses, batch, tokens=self.options.get("tokens"))
            self._is_checked = True
        gradients, found, losses = self._scored(model, batch, self.validation)
        self._found = (found, losses)
        return gradients

    def aggregate_and_log(self) -> GradDots | None:
        """Appends the scores to the log, and returns what `grad_dot` found; None where
        nothing was scored.
        """
        _, step, examples, texts = self._required()
        if self._found is None:
            return None
        found, losses = self._found
        if self.log is not None:
            scores = found.scores or {"model": found.total}  # of granularity="total"
            norms = (
                None
                if found.norms is None
                else found.norms or {"model": found.total_norm}
            )
            losses, scores, norms = jax.tree.map(
                lambda leaf: np.asarray(raw_array(leaf)),
                (losses, scores, norms),
                is_leaf=is_named,
            )
            self.log.append(StepScores(step, examples, losses, scores, norms, texts))
        return found

    def clear_gradients(self) -> None:
        """Forgets the attached batch and its scores; gradients are the caller's."""
        self._attached = self._found = None

    def should_save_metrics(self, step: int) -> bool:
        """Whether `save_metrics` is due after this step."""
        return self.log is not None and step % self.save_every == 0

    def save_metrics(self) -> None:
        """Writes the rows that are in memory to a file of the log."""
        if self.log is not None:
            self.log.flush()

    def cleanup(self) -> None:
        """Writes what is left; in PyTorch it also removes the hooks."""
        self.clear_gradients()
        self.save_metrics()

    def _required(self) -> tuple[Any, int, list[str], Sequence[str] | None]:
        if self._attached is None:
            raise RuntimeError(
                "There is no batch: call attach_train_batch before each step."
            )
        return self._attached

    def _gradient(self, model: Any, batch: Any) -> Any:
        of_loss = {
            name: self.options[name]
            for name in ("trainable", "tokens")
            if name in self.options
        }
        return val_direction(
            model, self.losses, batch, reduction=self.reduction, **of_loss
        )

    def _score(
        self, model: Any, batch: Any, validation: Any
    ) -> tuple[Any, GradDots, Any]:
        """The gradients, what `grad_dot` found, and the losses of the examples."""
        options = {
            "direction": self._gradient(model, validation),
            "reduction": self.reduction,
            **self.options,
        }
        gradients, found = grad_dot(model, self.losses, batch, **options)
        losses = Objective(self.reduction, self.options.get("tokens")).of_examples(
            self.losses(model, batch)
        )
        return gradients, found, losses
