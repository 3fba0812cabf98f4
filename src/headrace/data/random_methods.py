"""Methods of `Dataset` that use random numbers for each element."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.data.resampling import resample
from headrace.data.step_methods import StepMethods
from headrace.plan.node import call_site
from headrace.plan.random_map import DrawRandomWords, RandomMap

if TYPE_CHECKING:
    import numpy as np

    from headrace.data.dataset import Dataset

__all__ = ["RandomMethods"]


class RandomMethods(StepMethods):
    """Methods with random numbers that follow from a seed and the element's position."""

    def random_map(
        self,
        fn: Callable[[Any, np.random.Generator], Any] | Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        seed: int | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Replace each element by `fn(element, rng)`, with a generator for each element.

        The random numbers follow from the seed, the epoch and the element's position. They do not
        depend on threads, on the number of data workers, or on restores. Only above batches of
        elements that a `filter` or an `interleave` leaves, workers that read without `ordered=True`
        make other batches, with other numbers.

        >>> import headrace as hr
        >>> def add_noise(x, rng):
        ...     return x + rng.normal()
        >>> noisy = hr.Dataset.range(3).random_map(add_noise, seed=7)
        >>> parallel = hr.Dataset.range(3).random_map(add_noise, num_parallel_calls=2, seed=7)
        >>> list(noisy) == list(parallel)
        True

        Args:
            fn: Function of the element and a `numpy.random.Generator`; a tuple is passed as
                several arguments before the generator. The generator is used again for other
                elements, so the function must not keep it.
            num_parallel_calls: Threads that call it, or `AUTOTUNE`; None uses the reading thread.
            deterministic: False yields results as they are ready; None follows the options.
            seed: Seed of the numbers; None uses `Options.seed`, or draws one in each run. Each
                epoch has other numbers in any case.
            name: Name of the step in errors and in `explain`.
        """
        location = call_site(name)
        return self._from_plan(
            RandomMap(
                input=DrawRandomWords(input=self.plan, seed=seed, location=location),
                fn=fn,
                num_parallel_calls=num_parallel_calls,
                deterministic=deterministic,
                location=location,
            )
        )

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Any,
        initial_dist: Any = None,
        seed: int | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Drop elements at random, so that the classes have the distribution `target_dist`.

        Elements become `(class, element)`. A class that is the rarest in comparison with its target
        loses no elements, and no element is repeated.

        >>> import headrace as hr
        >>> numbers = hr.Dataset.range(10000)
        >>> balanced = numbers.rejection_resample(lambda x: x % 10 == 0, [0.5, 0.5], seed=7)
        >>> classes = [int(label) for label, _ in balanced]
        >>> bool(0.45 < np.mean(classes) < 0.55), classes.count(1) > 900
        (True, True)

        Args:
            class_func: Function of the element that returns its class, from 0 to the number of
                classes - 1; a tuple is passed as several arguments.
            target_dist: Probability of each class in the result.
            initial_dist: Probability of each class in this dataset. None estimates it from the
                elements read so far; under a data service the estimate then runs in the client.
            seed: Seed of the decisions, as for `random_map`.
            name: Name of the step in errors and in `explain`.
        """
        return self._from_plan(
            resample(self.plan, class_func, target_dist, initial_dist, seed, call_site(name))
        )
