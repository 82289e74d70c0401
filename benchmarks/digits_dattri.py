"""The attributions of `benchmarks.digits` by the code of dattri, in PyTorch.

Deng et al. 2024; `pip install dattri`, and PyTorch. Its EK-FAC takes maps without
biases alone, so a pixel and a hidden number that are 1 stand for them.
"""

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

# What is not installed with this library, and lint runs without it
torch: Any = importlib.import_module("torch")
dattri_task: Any = importlib.import_module("dattri.task")
dattri_if: Any = importlib.import_module("dattri.algorithm.influence_function")
dattri_trak: Any = importlib.import_module("dattri.algorithm.trak")
dattri_utils: Any = importlib.import_module("dattri.func.utils")

# [inner, pixel + 1] and [digit, inner + 1], with the biases last
Weights: TypeAlias = tuple[np.ndarray, np.ndarray]


def scores_of_dattri(
    models: Sequence[Weights],
    last: Weights,
    images: np.ndarray,
    numbers: np.ndarray,
    count: int,
    dampings: Sequence[float],
    projected: int,
) -> Iterator[tuple[str, int, np.ndarray]]:
    """The name of a method, how many trainings it takes, and its scores `[query,
    example]`, more where training on the example raises the loss.

    Args:
        models: that were trained on halves.
        last: the model that was trained on all examples.
        images: of the examples, and then of the queries.
        numbers: their digits.
        count: how many of them are examples.
        dampings: of EK-FAC, times the mean eigenvalue.
        projected: dimensions of TRAK.
    """
    model = _network(last)
    loaders = _loaders(images, numbers, count)
    for damping in dampings:
        found = _ekfac(model, loaders, damping)
        yield f"dattri's EK-FAC, damping {damping:g}", 0, -found.T
    found = _trak(model, models, loaders, projected)
    yield "dattri's TRAK", len(models), -found.T


def _loaders(images: np.ndarray, numbers: np.ndarray, count: int) -> tuple[Any, Any]:
    """Of the examples and of the queries."""
    with_one = np.concatenate([images, np.ones((len(images), 1), np.float32)], axis=1)
    tensors = torch.tensor(with_one), torch.tensor(numbers, dtype=torch.int64)
    of_examples = [tensor[:count] for tensor in tensors]
    of_queries = [tensor[count:] for tensor in tensors]
    loaders = []
    for own in (of_examples, of_queries):
        dataset = torch.utils.data.TensorDataset(*own)
        loaders.append(torch.utils.data.DataLoader(dataset, batch_size=256))
    examples, queries = loaders
    return examples, queries


class _WithOne(torch.nn.Module):
    def forward(self, inner: Any) -> Any:
        one = torch.ones((*inner.shape[:-1], 1), dtype=inner.dtype)
        return torch.cat([torch.tanh(inner), one], dim=-1)


def _network(weights: Weights) -> Any:
    hidden, head = weights
    model = torch.nn.Sequential(
        torch.nn.Linear(*hidden.shape[::-1], bias=False),
        _WithOne(),
        torch.nn.Linear(*head.shape[::-1], bias=False),
    )
    model.load_state_dict(_state(weights))
    return model.eval()


def _state(weights: Weights) -> dict[str, Any]:
    hidden, head = map(torch.tensor, weights)
    return {"0.weight": hidden, "2.weight": head}


def _cross_entropy(model: Any, parameters: Any, data: Any) -> Any:
    """The loss of an image or the mean over some."""
    image, number = data
    logits = torch.func.functional_call(model, parameters, image)
    return torch.nn.functional.cross_entropy(logits, number)


def _margin(model: Any, parameters: Any, data: Any) -> Any:
    """The log of the odds of an image's digit."""
    loss = _cross_entropy(model, parameters, data)
    return -loss - torch.log(-torch.expm1(-loss))


def _ekfac(model: Any, loaders: tuple[Any, Any], damping: float) -> np.ndarray:
    loss = functools.partial(_cross_entropy, model)
    task = dattri_task.AttributionTask(loss, model, model.state_dict())
    attributor = dattri_if.IFAttributorEKFAC(task)
    examples, queries = loaders
    attributor.cache(examples)
    found = [values.flatten() for values in attributor.cached_lambdas.values()]
    attributor.damping = damping * torch.cat(found).mean()
    return attributor.attribute(examples, queries).detach().double().numpy()


def _trak(
    model: Any,
    models: Sequence[Weights],
    loaders: tuple[Any, Any],
    projected: int,
) -> np.ndarray:
    margin = functools.partial(_margin, model)
    states = [_state(weights) for weights in models]
    task = dattri_task.AttributionTask(margin, model, states)

    def probability(parameters: Any, data: Any) -> Any:
        return torch.exp(-_cross_entropy(model, parameters, data))

    attributor = dattri_trak.TRAKAttributor(
        task, probability, projector_kwargs={"proj_dim": projected}
    )
    examples, queries = loaders
    attributor.cache(examples)
    return attributor.attribute(queries).detach().double().numpy()
