"""Loaders, dataset conversion and embedding layers for PyTorch: the public names of `hr.torch`.

PyTorch is imported on the first use of one of these names.
"""

from typing import TYPE_CHECKING, Any

from headrace.errors import MissingDependencyError
from headrace.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from headrace.adapters.torch_datasets import from_torch
    from headrace.adapters.torch_iterator import LoaderIterator
    from headrace.adapters.torch_loader import Loader, loader, to_torch
    from headrace.adapters.torch_tables import Embedding, EmbeddingBag, TableOptimizer, prefetch
else:
    _load, __dir__ = lazy_attributes(
        __name__,
        {
            "Embedding": "headrace.adapters.torch_tables",
            "EmbeddingBag": "headrace.adapters.torch_tables",
            "Loader": "headrace.adapters.torch_loader",
            "LoaderIterator": "headrace.adapters.torch_iterator",
            "TableOptimizer": "headrace.adapters.torch_tables",
            "from_torch": "headrace.adapters.torch_datasets",
            "loader": "headrace.adapters.torch_loader",
            "prefetch": "headrace.adapters.torch_tables",
            "to_torch": "headrace.adapters.torch_loader",
        },
        missing="headrace.data.missing_names:missing_name_message",
    )

    def __getattr__(name: str) -> Any:
        try:
            return _load(name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise MissingDependencyError(
                f"hr.torch.{name} requires PyTorch, which is not installed: "
                "pip install 'headrace[torch]', or torch alone"
            ) from error


__all__ = [
    "Embedding",
    "EmbeddingBag",
    "Loader",
    "LoaderIterator",
    "TableOptimizer",
    "from_torch",
    "loader",
    "prefetch",
    "to_torch",
]
