"""Datasets for Grain pipelines: the public names of `hr.grain`.

Grain is imported on the first use of one of these names.
"""

from typing import TYPE_CHECKING, Any

from headrace.errors import MissingDependencyError
from headrace.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from headrace.adapters.grain_datasets import iter_dataset
    from headrace.adapters.grain_source import source
else:
    _load, __dir__ = lazy_attributes(
        __name__,
        {
            "iter_dataset": "headrace.adapters.grain_datasets",
            "source": "headrace.adapters.grain_source",
        },
        missing="headrace.data.missing_names:missing_name_message",
    )

    def __getattr__(name: str) -> Any:
        try:
            return _load(name)
        except ModuleNotFoundError as error:
            if error.name != "grain":
                raise
            raise MissingDependencyError(
                f"hr.grain.{name} requires Grain, which is not installed: "
                "pip install 'headrace[grain]', or grain alone"
            ) from error


__all__ = ["iter_dataset", "source"]
