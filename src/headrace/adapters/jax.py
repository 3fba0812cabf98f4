"""JAX arrays on devices from datasets: the public names of `hr.jax`.

JAX is imported on the first use of one of these names.
"""

from typing import TYPE_CHECKING, Any

from headrace.errors import MissingDependencyError
from headrace.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from headrace.adapters.jax_iterator import DeviceIterator, device_iterator, to_jax
    from headrace.adapters.jax_tables import lookup, prefetch
else:
    _load, __dir__ = lazy_attributes(
        __name__,
        {
            "DeviceIterator": "headrace.adapters.jax_iterator",
            "device_iterator": "headrace.adapters.jax_iterator",
            "lookup": "headrace.adapters.jax_tables",
            "prefetch": "headrace.adapters.jax_tables",
            "to_jax": "headrace.adapters.jax_iterator",
        },
        missing="headrace.data.missing_names:missing_name_message",
    )

    def __getattr__(name: str) -> Any:
        try:
            return _load(name)
        except ModuleNotFoundError as error:
            if error.name not in ("jax", "jaxlib"):
                raise
            raise MissingDependencyError(
                f"hr.jax.{name} requires JAX, which is not installed: "
                "pip install 'headrace[jax]', or jax alone"
            ) from error


__all__ = ["DeviceIterator", "device_iterator", "lookup", "prefetch", "to_jax"]
