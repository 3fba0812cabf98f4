"""`strategy.extended`: the few names of tf.distribute there that have a meaning here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

__all__ = ["Extended"]

_SCOPE = "strategy.scope()"
_ELSEWHERE = {
    "batch_reduce_to": "strategy.reduce(op, structure, axis=None), of any structure",
    "broadcast_to": "the value itself: strategy.run passes it to each replica",
    "call_for_each_replica": "strategy.run(fn, args)",
    "experimental_between_graph": "nothing: leave it out",
    "experimental_make_numpy_dataset": "Dataset.from_tensor_slices(arrays)",
    "read_var": "variable.read()",
    "reduce_to": "strategy.reduce(op, value, axis=None)",
    "should_checkpoint": "strategy.first_replica == 0",
    "should_save_summary": "strategy.first_replica == 0",
    "update": "variable.assign(...) in replica context",
    "value_container": "the variable itself",
    "variable_created_in_scope": f"making variables in {_SCOPE}",
}


class Extended:
    """What `strategy.extended` has.

    Args:
        strategy: Whose it is.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Devices of the replicas of this process."""
        devices: tuple[str, ...] = self._strategy.worker_devices
        return devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Devices that hold variables: those of the replicas."""
        return self.worker_devices

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Return a context manager; variables made in it have copies where that one has."""
        if getattr(colocate_with_variable, "strategy", None) is not self._strategy:
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this "
                f"Strategy.scope(), but got {colocate_with_variable!r:.80}"
            )
        return nullcontext()

    if not TYPE_CHECKING:  # or every name would pass for an attribute

        def __getattr__(self, name: str) -> Any:
            words = f"strategy.extended has no {name!r}"
            if name in _ELSEWHERE:
                words += f"; what does its work: {_ELSEWHERE[name]}"
            else:
                words += (
                    "; it has worker_devices, parameter_devices and colocate_vars_with. What "
                    "strategies do is on the strategy itself: run, reduce, gather, local_results"
                )
            raise AttributeError(words, name=name, obj=self)
