"""Methods of `Dataset` that take elements from several datasets, or drop repeated ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic

from headrace.data.element_type import T_co
from headrace.data.step_methods import StepMethods
from headrace.plan.combining import Choose, Sample
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Map
from headrace.plan.node import Node, call_site
from headrace.plan.unique import Unique
from headrace.sources.memory import RangeSource

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["SelectionMethods"]


class SelectionMethods(StepMethods, Generic[T_co]):
    """Methods that select elements."""

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Any],
        weights: Any = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset[Any]:
        """Take each element from a randomly drawn dataset.

        >>> import headrace as hr
        >>> ones, twos = (hr.Dataset.from_tensors(n).repeat() for n in (1, 2))
        >>> mixed = hr.Dataset.sample_from_datasets([ones, twos], weights=[0.9, 0.1], seed=7)
        >>> sum(int(x) for x in mixed.take(1000)) < 1200
        True
        >>> stages = [(0, [1, 0]), (3, [0.5, 0.5]), (1000, [0, 1])]
        >>> mixed = hr.Dataset.sample_from_datasets([ones, twos], weights=stages, seed=7)
        >>> [int(x) for x in mixed.take(3)], [int(x) for x in mixed.skip(1000).take(3)]
        ([1, 1, 1], [2, 2, 2])

        Args:
            datasets: The datasets; their elements have the same structure.
            weights: Probability weights of the datasets; None draws all with equal probability. For
                weights that change, pass pairs `(step, weights)` in ascending order from step 0 on,
                a function that returns the weights of a step, or a Dataset of weights, one row for
                each step. A step is the number of an element of the mixture, from 0 on in each
                epoch. Steps that only have weights for exhausted datasets are skipped.
            seed: Seed of the choices; None draws new ones in each run.
            stop_on_empty_dataset: Whether to end when an exhausted dataset is drawn, instead of
                drawing again among the others.
            rerandomize_each_iteration: Whether each epoch has new choices; None means only if no
                seed is given.
        """
        weight_inputs: tuple[Node, ...] = ()
        if isinstance(weights, StepMethods):
            weight_inputs, weights = (weights.plan,), None
        elif callable(weights):
            steps = FromSource(source=RangeSource(0, None, 1), location=call_site())
            weight_inputs = (Map(input=steps, fn=weights, location=call_site()),)
            weights = None
        return cls._from_plan(
            Sample(
                datasets=cls._check_datasets("datasets", datasets),
                weight_inputs=weight_inputs,
                weights=weights,
                seed=seed,
                stop_on_empty_dataset=stop_on_empty_dataset,
                rerandomize_each_iteration=rerandomize_each_iteration,
                location=call_site(),
            )
        )

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[Any], choice_dataset: Any, stop_on_empty_dataset: bool = True
    ) -> Dataset[Any]:
        """Take each element from the dataset whose index `choice_dataset` yields.

        >>> import headrace as hr
        >>> letters = [hr.Dataset.from_tensors(letter).repeat() for letter in "abc"]
        >>> choices = hr.Dataset.range(3).repeat(2)
        >>> "".join(hr.Dataset.choose_from_datasets(letters, choices))
        'abcabc'

        Args:
            datasets: The datasets; their elements have the same structure.
            choice_dataset: Dataset of integers from 0 to the number of datasets - 1.
            stop_on_empty_dataset: Whether to end when an exhausted dataset is chosen, instead of
                continuing with the next choice.
        """
        (choices,) = cls._check_datasets("choice_dataset", [choice_dataset])
        return cls._from_plan(
            Choose(
                datasets=cls._check_datasets("datasets", datasets),
                choices=choices,
                stop_on_empty_dataset=stop_on_empty_dataset,
                location=call_site(),
            )
        )

    @classmethod
    def _check_datasets(cls, name: str, datasets: Sequence[Any]) -> tuple[Node, ...]:
        if not isinstance(datasets, list | tuple):
            raise TypeError(f"`{name}` must be a list of Datasets, but got {datasets!r:.80}")
        for dataset in datasets:
            if not isinstance(dataset, StepMethods):
                raise TypeError(
                    f"`{name}` must contain Datasets, but has a {type(dataset).__name__}; "
                    "create one from arrays with Dataset.from_tensor_slices"
                )
        return tuple([dataset.plan for dataset in datasets])

    def unique(self, *, name: str | None = None) -> Dataset[T_co]:
        """Drop each element that equals an earlier one.

        Elements are equal if their structures, dtypes, shapes and bits are: NaN equals NaN, and 1
        differs from 1.0. A key of at most 16 bytes is kept in memory for each distinct element.

        A state of the iterator contains no elements: a restore reads the input again from its
        start, which takes as long as it took to reach the state, without the time of the steps
        after this one.

        >>> import headrace as hr
        >>> numbers = hr.Dataset.from_tensor_slices([3, 1, 3, 2, 1])
        >>> [int(x) for x in numbers.unique()]
        [3, 1, 2]

        Args:
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(Unique, name=name)
