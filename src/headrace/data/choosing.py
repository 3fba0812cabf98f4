"""The part of `Dataset` that takes each element from one of several datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from headrace.data.absent import AbsentNames
from headrace.plan.choosing import Choose, Sample
from headrace.plan.node import Node, call_site

__all__ = ["Choosing"]


class Choosing(metaclass=AbsentNames):
    """Makes a dataset of several, whose elements come one by one from any of them."""

    if TYPE_CHECKING:

        @property
        def plan(self) -> Node: ...  # noqa: D102

        def __init__(self, plan: Node) -> None: ...

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Any],
        weights: Any = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Self:
        """Take each element from one of the datasets at random.

        >>> import headrace as hr
        >>> ones, twos = (hr.Dataset.from_tensors(n).repeat() for n in (1, 2))
        >>> mixed = hr.Dataset.sample_from_datasets([ones, twos], weights=[0.9, 0.1], seed=7)
        >>> sum(int(x) for x in mixed.take(1000)) < 1200
        True

        Args:
            datasets: The datasets; their elements are alike.
            weights: How likely each is, or a Dataset of such lists, one for each element; None:
                all alike.
            seed: Seed of the choices; None: others in each run.
            stop_on_empty_dataset: Whether to end when a dataset is drawn that has ended, instead
                of drawing again among the others.
            rerandomize_each_iteration: Whether each pass has choices of its own; None: only
                without a seed.
        """
        drawn = isinstance(weights, Choosing)
        return cls(
            Sample(
                datasets=cls._plans("datasets", datasets),
                drawn_weights=(weights.plan,) if isinstance(weights, Choosing) else (),
                weights=None if drawn else weights,
                seed=seed,
                stop_on_empty_dataset=stop_on_empty_dataset,
                rerandomize_each_iteration=rerandomize_each_iteration,
                location=call_site(),
            )
        )

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[Any], choice_dataset: Any, stop_on_empty_dataset: bool = True
    ) -> Self:
        """Take each element from the dataset whose number `choice_dataset` yields.

        >>> import headrace as hr
        >>> letters = [hr.Dataset.from_tensors(letter).repeat() for letter in "abc"]
        >>> choices = hr.Dataset.range(3).repeat(2)
        >>> "".join(hr.Dataset.choose_from_datasets(letters, choices))
        'abcabc'

        Args:
            datasets: The datasets; their elements are alike.
            choice_dataset: Integers from 0 to the number of datasets - 1.
            stop_on_empty_dataset: Whether to end when a dataset is chosen that has ended, instead
                of going on with the next choice.
        """
        (choices,) = cls._plans("choice_dataset", [choice_dataset])
        return cls(
            Choose(
                datasets=cls._plans("datasets", datasets),
                choices=choices,
                stop_on_empty_dataset=stop_on_empty_dataset,
                location=call_site(),
            )
        )

    @classmethod
    def _plans(cls, name: str, datasets: Sequence[Any]) -> tuple[Node, ...]:
        if not isinstance(datasets, list | tuple):
            raise TypeError(f"`{name}` must be a list of Datasets, but got {datasets!r:.80}")
        for dataset in datasets:
            if not isinstance(dataset, Choosing):
                raise TypeError(
                    f"`{name}` must be of Datasets, but got a {type(dataset).__name__}; "
                    "Dataset.from_tensor_slices makes one of rows in memory"
                )
        return tuple([dataset.plan for dataset in datasets])
