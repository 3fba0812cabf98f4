"""The version of Headrace, which is written here only: the package's metadata is read from it."""

__all__ = ["__version__"]

__version__ = "0.2.0"
