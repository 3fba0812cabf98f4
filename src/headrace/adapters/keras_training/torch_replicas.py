"""Training steps of mirrored replicas on the back end PyTorch: the parts one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import keras
import numpy as np
import torch

from headrace.adapters.keras_training.mirrored_trainer import ReplicaModelSteps, scaled_sums
from headrace.adapters.keras_training.steps import recording_gradients
from headrace.adapters.keras_training.torch_steps import check_weights_unchanged

__all__ = ["TorchReplicas"]


class TorchReplicas(ReplicaModelSteps):
    """Makes `train_function` and `test_function` of a model.

    Args:
        model: Compiled.
        strategy: A strategy with mirrored replicas.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(model, strategy)
        model.make_train_function(force=True)  # checks steps_per_execution
        self.train_function: Any = _unwrap_batch_list(self._train)
        if self.has_other_workers:
            self.test_function: Any = _unwrap_batch_list(self._test)

    def _train(self, batch: Any) -> dict[str, Any]:
        model = self._model
        num_local_rows, num_global_rows, batch = self._local_part(batch)
        if not num_global_rows:
            return dict(model.get_metrics_result())
        metrics = self._begin_metrics()
        step = _PartialSums(model, self.state, self.seeds)
        with recording_gradients(model.optimizer) as recorded:
            for number, (begin, end) in enumerate(self.split_rows(_num_rows(batch))):
                share = (end - begin) / num_global_rows
                step.begin(self.seed_offset(number))
                unchanged = check_weights_unchanged(model, model.trainable_variables)
                with scaled_sums(model, 1 / share), unchanged:
                    logs = model.train_step(_slice_batch(batch, begin, end))
                step.end(share, recorded, logs)
                recorded.clear()
        if self.has_other_workers:
            step.replace(self._sum_over_workers(step.tensors(), num_local_rows))
        self._end_metrics(metrics, num_local_rows)
        step.assign()
        if step.gradients:
            with torch.no_grad():
                model.optimizer.apply(step.gradients, model.trainable_variables)
        return step.logs()

    # --- several workers --------------------------------------------------------------------------

    def _test(self, batch: Any) -> dict[str, Any]:
        model = self._model
        num_local_rows, num_global_rows, batch = self._local_part(batch)
        if num_global_rows:
            metrics = self._begin_metrics()
            with torch.no_grad(), scaled_sums(model, num_global_rows / _num_rows(batch)):
                model.test_step(batch)
            self._end_metrics(metrics, num_local_rows)
        return dict(model.get_metrics_result())

    def _local_part(self, batch: Any) -> tuple[int, int, Any]:
        """Return the numbers of local rows and of all rows, and the local rows or one of zeros."""
        num_local_rows = _num_rows(batch)
        if not num_local_rows:
            batch = keras.tree.map_structure(
                lambda leaf: None if leaf is None else leaf.new_zeros((1, *leaf.shape[1:])), batch
            )
        return num_local_rows, self.total_rows(num_local_rows), batch

    def _begin_metrics(self) -> list[Any]:
        """Set metrics to zero where those of other workers are added; return what they were."""
        variables = self._model.metrics_variables if self.has_other_workers else []
        before = [each.value.clone() for each in variables]
        for each in variables:
            each.assign(torch.zeros_like(each.value))
        return before

    def _end_metrics(self, before: Sequence[Any], num_local_rows: int) -> None:
        """Add metrics of all workers to what they were."""
        if self.has_other_workers:
            variables = self._model.metrics_variables
            sums = self._sum_over_workers([each.value for each in variables], num_local_rows)
            for variable, old, new in zip(variables, before, sums, strict=True):
                variable.assign(old + new)

    def _sum_over_workers(self, tensors: Sequence[Any], num_local_rows: int) -> list[Any]:
        """Return sums over all workers. A worker without rows ran a row of zeros for nothing."""
        arrays = [keras.ops.convert_to_numpy(each) for each in tensors]
        if not num_local_rows:
            arrays = [np.zeros_like(each) for each in arrays]
        return [
            torch.from_numpy(np.array(total)).to(tensor)
            for total, tensor in zip(self.sum_over_workers(arrays), tensors, strict=True)
        ]


class _PartialSums:
    """Adds up what the parts of a batch compute.

    Args:
        model: The model that is trained.
        state: The non-trainable variables that the step may change.
        seeds: Ids of those that count draws of random numbers.

    Attributes:
        gradients: The mean over rows, of the trainable variables; None where there is none. Empty:
            the optimizer was not called.
    """

    def __init__(self, model: Any, state: Sequence[Any], seeds: Set[int]) -> None:
        self._model = model
        self._state = state
        self._seeds = seeds
        self._before = [each.value.detach().clone() for each in self._state]
        #: How each variable of the state changes: the mean over rows of statistics, and the sum of
        #: other counters than those of random numbers.
        self._changes = [torch.zeros_like(self._is_summed(each)) for each in self._state]
        self._extra: dict[str, Any] = {}
        self._names: list[str] = []
        self.gradients: list[Any] = []

    def _is_summed(self, variable: Any) -> Any:
        value = variable.value.detach()
        return value.float() if id(variable) in self._seeds else value

    def begin(self, seed_offset: int) -> None:
        """Set the state to what it is before the step of a replica."""
        with torch.no_grad():
            for variable, old in zip(self._state, self._before, strict=True):
                variable.value.copy_(old)
                if seed_offset and id(variable) in self._seeds:
                    # Bits of 32, as of the seeds on JAX.
                    variable.value[0] += seed_offset - ((seed_offset >> 31) << 32)

    def end(self, share: float, recorded: Sequence[tuple[Any, Any]], logs: Any) -> None:
        """Add what a replica computed, which has this share of the rows."""
        found = {id(variable): gradient for gradient, variable in recorded}
        if found:
            parts = [found.get(id(each)) for each in self._model.trainable_variables]
            totals = self.gradients or [None] * len(parts)
            self.gradients = [
                _add_weighted(old, share, new) for old, new in zip(totals, parts, strict=True)
            ]
        for index, variable in enumerate(self._state):
            old, new = self._before[index], variable.value.detach()
            if id(variable) in self._seeds:
                self._changes[index][1] += share * (new[1] - old[1])
            elif not torch.equal(new, old):
                scale = share if new.is_floating_point() else 1
                self._changes[index] += scale * (new - old)
        self._names = list(logs)
        known = self._model.get_metrics_result()
        for name, value in logs.items():
            if name not in known:
                value = value.detach() if isinstance(value, torch.Tensor) else value
                self._extra[name] = self._extra.get(name, 0) + share * value

    def tensors(self) -> list[Any]:
        """Return what is added over workers."""
        gradients = [each for each in self.gradients if each is not None]
        logs = [torch.as_tensor(each) for each in self._extra.values()]
        return [*gradients, *self._changes, *logs]

    def replace(self, tensors: Sequence[Any]) -> None:
        """Have sums over workers in place of those of this one."""
        rest = iter(tensors)
        self.gradients = [None if each is None else next(rest) for each in self.gradients]
        self._changes = [next(rest) for _ in self._changes]
        self._extra = {name: next(rest) for name in self._extra}

    def assign(self) -> None:
        """Set the state to what it is after the step."""
        with torch.no_grad():
            for variable, old, change in zip(self._state, self._before, self._changes, strict=True):
                if id(variable) in self._seeds:
                    change = change.round()
                variable.value.copy_(old + change.to(old.dtype))

    def logs(self) -> dict[str, Any]:
        """Return what the step returns: metrics, and the mean of what is beside them."""
        known = {**self._model.get_metrics_result(), **self._extra}
        return {name: known[name] for name in self._names}


def _unwrap_batch_list(step: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any]:
    """Return a function as Keras calls it, with a list that has a batch."""
    return lambda batches: step(batches[0])


def _num_rows(batch: Any) -> int:
    return int(next(each.shape[0] for each in keras.tree.flatten(batch) if each is not None))


def _slice_batch(batch: Any, begin: int, end: int) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[begin:end], batch)


def _add_weighted(total: Any, share: float, value: Any) -> Any:
    if value is None:
        return total
    return share * value if total is None else total + share * value
