"""Wrappers around methods of `keras.Model` that support Headrace's datasets and strategies.

`install` patches `keras.Model`: its methods check their arguments, and then call the original or a
trainer of `keras_training`. Keras does not know about strategies, and passes neither `class_weight`
nor `sample_weight`, `y` and `batch_size` to data adapters, so without the checks it would ignore
them silently. Calls outside of scopes without datasets of Headrace are passed on unchanged. If
TensorFlow is not installed, creating a `keras.callbacks.TensorBoard`, which requires it, raises an
error.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras

from headrace.adapters.keras_dataset import KerasDataset
from headrace.adapters.keras_training.embedding_internals import (
    leave_optimizers_unbuilt,
    replace_saving,
)
from headrace.adapters.keras_training.embedding_tables import (
    loading_tables,
    saving_tables,
    table_layers,
)
from headrace.adapters.keras_training.keras_internals import (
    check_back_end,
    get_or_attach,
    set_strategy,
    strategy_of,
)
from headrace.adapters.keras_training.table_embedding import install as install_tables
from headrace.adapters.keras_training.training_data import DatasetCreator
from headrace.arguments import check_int
from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.distribute.current_strategy import get_strategy
from headrace.distribute.dataset import DistributedDataset, DistributedDatasetsFromFunction
from headrace.distribute.iterator import DistributedIterator
from headrace.distribute.strategy import Strategy
from headrace.errors import FailedPreconditionError
from headrace.frameworks.keras_state import SUPPORTED_KERAS_USE, set_keras_reducer
from headrace.parameter_server.pickling import PerWorkerInput
from headrace.parameter_server.strategy import ParameterServerStrategy

__all__ = ["distribute", "install", "mark_models"]

_lock = threading.Lock()
_SHARDS = "pss_evaluation_shards"


def install() -> None:
    """Patch the methods of `keras.Model`. Idempotent."""
    with _lock:
        if hasattr(keras.Model.fit, "_is_headrace"):
            return
        _replace_new()
        _replace_compile()
        for name, prepare in _CHECKS.items():
            _replace(name, prepare)
        if importlib.util.find_spec("tensorflow") is None:
            _replace_tensorboard()
        set_keras_reducer(_reduce_shared)
        install_tables()
        replace_saving(saving_tables, loading_tables)
        leave_optimizers_unbuilt(table_layers)


def mark_models() -> None:
    """Assign all existing models to the current strategy.

    Called when the scope exits if Keras was imported inside it: all models were created there.
    """
    if (strategy := _distributed_strategy()) is not None:
        for each in gc.get_objects():
            if keras.Model in type(each).__mro__:
                set_strategy(each, strategy)


def _distributed_strategy() -> Any:
    """Return the current strategy if it has several replicas or parameter servers, else None."""
    strategy = get_strategy()
    return None if _is_single_replica(strategy) else strategy


def _is_single_replica(strategy: Any) -> bool:
    return strategy.variable_type is None and strategy.num_replicas_in_sync == 1


def _replace_new() -> None:
    original = keras.Model.__new__

    @functools.wraps(original)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        if (strategy := _distributed_strategy()) is not None:
            set_strategy(model, strategy)
        return model

    keras.Model.__new__ = staticmethod(new)


def _replace(name: str, prepare: Callable[[dict[str, Any]], None] | None) -> None:
    original = getattr(keras.Model, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if name in _DISTRIBUTED and isinstance(strategy, ParameterServerStrategy):
            if strategy.cluster.is_closed and name == "fit":
                raise FailedPreconditionError(
                    f"fit of the Keras model {self.name!r}: its strategy is closed. Close it after "
                    "the last fit, or continue with keras.models.clone_model(model) and its "
                    "weights under another strategy"
                )
            if not strategy.cluster.is_closed:
                return _on_parameter_servers(self, strategy, name)(*args, **kwargs)
        elif name in _TRAINING:
            _check_strategy(self, name)
        trainer = _mirrored_trainer(self, strategy)
        if prepare is None and trainer is None:
            return original(self, *args, **kwargs)
        try:
            call = signature.bind(self, *args, **kwargs)
        except TypeError:
            return original(self, *args, **kwargs)  # raises Keras' error
        with contextlib.ExitStack() as opened:
            if trainer is not None:
                trainer.prepare(name, call.arguments, opened)
            _open_creators(call.arguments, opened)
            if prepare is not None:
                prepare(call.arguments)
            return original(*call.args, **call.kwargs)

    method._is_headrace = True  # type: ignore[attr-defined]
    setattr(keras.Model, name, method)


def _replace_compile() -> None:
    # Patch the class that defines `compile`: Keras compares methods with those of that class.
    owner = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    original = owner.compile

    @functools.wraps(original)
    def compile_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _SHARDS in kwargs:
            _set_evaluation_shards(self, kwargs.pop(_SHARDS))
        return original(self, *args, **kwargs)

    owner.compile = compile_model


def _set_evaluation_shards(model: Any, shards: Any) -> None:
    if shards is not None and shards != "auto":
        try:
            shards = check_int(_SHARDS, shards, minimum=0)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}; None, 'auto' and 0 are accepted, too") from None
    object.__setattr__(model, "_headrace_evaluation_shards", shards)


def _replace_tensorboard() -> None:
    kind = keras.callbacks.TensorBoard
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self).summary is kind.summary:  # a subclass may write without TensorFlow
            raise ImportError(
                "keras.callbacks.TensorBoard requires TensorFlow, which is not installed: use "
                "hr.keras.TensorBoard, which writes the same without it"
            )
        original(self, *args, **kwargs)

    kind.__init__ = init


def _on_parameter_servers(model: Any, strategy: Any, name: str) -> Callable[..., Any]:
    # Imported lazily, since it imports Keras' back end.
    from headrace.adapters.keras_training.parameter_server_trainer import (  # noqa: PLC0415
        ParameterServerTrainer,
    )

    trainer = get_or_attach(model, "trainer", lambda _: ParameterServerTrainer(model, strategy))
    method: Callable[..., Any] = getattr(trainer, name)
    return method


def _reduce_shared(value: Any) -> Any:
    # Imported lazily, as above.
    from headrace.adapters.keras_training.shared_objects import reduce_shared  # noqa: PLC0415

    return reduce_shared(value)


def _mirrored_trainer(model: Any, strategy: Any) -> Any:
    """Return the trainer for mirrored replicas; None if the model has no such strategy."""
    if strategy is None or isinstance(strategy, ParameterServerStrategy):
        return None
    # Imported lazily, as above.
    from headrace.adapters.keras_training.mirrored_trainer import (  # noqa: PLC0415
        MirroredTrainer,
    )

    return get_or_attach(model, "trainer", lambda _: MirroredTrainer(model, strategy))


def distribute(
    model: keras.Model,
    strategy: Any,
    pss_evaluation_shards: int | Literal["auto"] | None = None,
) -> keras.Model:
    """Run `fit`, `evaluate` and `predict` of a model under a strategy; return the model.

    Models created in `strategy.scope()` need no call.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> strategy = hr.distribute.OneDeviceStrategy()
    >>> hr.keras.distribute(model, strategy) is model
    True

    Args:
        model: A Keras 3 model; it may be built, compiled and trained already. Parameter servers
            continue with the slots of its optimizer; mirrored replicas start without slots.
        strategy: A `ParameterServerStrategy`, `MirroredStrategy` or `MultiWorkerMirroredStrategy`.
            With one replica nothing changes: Keras trains the model in this process.
        pss_evaluation_shards: Number of scheduled functions that an evaluation under a
            `ParameterServerStrategy` is divided into, if the number of batches is known. With None,
            "auto" or 0, each function evaluates `steps_per_execution` batches. Evaluation is exact
            in all cases. `model.compile` accepts this argument, too.

    Raises:
        FailedPreconditionError: If the model belongs to another strategy.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a keras.Model, but got a value of type {type(model).__name__}"
        )
    check_back_end()
    if not isinstance(strategy, Strategy):
        raise TypeError(
            "`strategy` must be a ParameterServerStrategy, MirroredStrategy or "
            f"MultiWorkerMirroredStrategy, but got a value of type {type(strategy).__name__}"
        )
    known = strategy_of(model)
    if known is not None and known is not strategy:
        raise FailedPreconditionError(
            f"the Keras model {model.name!r} already belongs to {known!r}: create another model, "
            "or call keras.models.clone_model(model), outside of its scope"
        )
    if pss_evaluation_shards is not None:
        _set_evaluation_shards(model, pss_evaluation_shards)
    if not _is_single_replica(strategy):
        set_strategy(model, strategy)
    return model


def _check_strategy(model: Any, name: str) -> None:
    own, strategy = strategy_of(model), _distributed_strategy()
    if isinstance(own, ParameterServerStrategy):
        strategy = strategy or own
    elif strategy is own:
        return
    if strategy is not None:
        raise FailedPreconditionError(
            f"{name} of the Keras model {model.name!r} in the scope of {strategy!r}: Keras would "
            "run it in this process only, as a single replica, regardless of the strategy. "
            f"{SUPPORTED_KERAS_USE}"
        )


# --- arguments ------------------------------------------------------------------------------------


def _open_creators(given: dict[str, Any], opened: contextlib.ExitStack) -> None:
    """Replace each `hr.keras.DatasetCreator` by its dataset, which is closed after the call."""
    for name in ("x", "validation_data"):
        creator = given.get(name)
        if isinstance(creator, DatasetCreator):
            given[name] = opened.enter_context(creator.open_data())


def _prepare_fit(given: dict[str, Any]) -> None:
    data, validation = given.get("x"), given.get("validation_data")
    _check_kind("x", data)
    parts = validation if isinstance(validation, list | tuple) else (validation,)
    for part in parts:
        _check_kind("validation_data", part)
    if isinstance(data, KerasDataset):
        _check_unused("fit", given, ("y", "batch_size", "sample_weight"))
        _check_finite("fit", data, given, "steps_per_epoch")
        if given.get("class_weight") is not None:
            given["x"] = data.with_class_weight(given["class_weight"])
            given["class_weight"] = None
    if parts and isinstance(parts[0], KerasDataset):
        if any(part is not None for part in parts[1:]):
            raise ValueError(
                "`validation_data` of fit has labels or weights in addition to an "
                "hr.keras.dataset, which Keras would ignore: make the dataset's elements (x, y) or "
                "(x, y, sample_weight)"
            )
        _check_unused("fit", given, ("validation_batch_size",))
        _check_finite("fit", parts[0], given, "validation_steps")


def _prepare_reading(method: str) -> Callable[[dict[str, Any]], None]:
    def prepare(given: dict[str, Any]) -> None:
        if given.get("kwargs", {}).get("_use_cached_eval_dataset"):
            return  # called by fit, which has checked them
        data = given.get("x")
        _check_kind("x", data)
        if isinstance(data, KerasDataset):
            _check_unused(method, given, ("y", "batch_size", "sample_weight"))
            _check_finite(method, data, given, "steps")

    return prepare


def _check_kind(argument: str, value: Any) -> None:
    """Raise TypeError for objects of Headrace that Keras cannot read."""
    if isinstance(value, KerasDataset):
        return
    for kinds, hint in _UNREADABLE:
        if isinstance(value, kinds):
            raise TypeError(f"`{argument}` is a {type(value).__name__}, but {hint}")
    if type(value).__module__.startswith("headrace.adapters."):  # of hr.torch or hr.jax
        raise TypeError(f"`{argument}` is a {type(value).__name__}, but {_UNREADABLE[0][1]}")


_UNREADABLE: Sequence[tuple[Any, str]] = (
    (
        (Dataset, DistributedDataset, DistributedDatasetsFromFunction),
        "Keras requires an hr.keras.dataset: pass hr.keras.dataset(dataset)",
    ),
    (
        (DatasetIterator, DistributedIterator),
        "Keras needs a new iterator for each epoch: pass hr.keras.dataset(dataset)",
    ),
    (
        PerWorkerInput,
        "it is read by workers, not in this process: pass hr.keras.dataset(dataset) with the "
        "Dataset that was given to the strategy",
    ),
)


def _check_unused(method: str, given: dict[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError for arguments that Keras would ignore with an `hr.keras.dataset`."""
    for name in names:
        if given.get(name) is not None:
            raise ValueError(
                f"`{name}` of {method} would be ignored by Keras, because the input is an "
                f"hr.keras.dataset: {_ALTERNATIVES[name]}"
            )


_ALTERNATIVES = {
    "y": "make the dataset's elements (x, y)",
    "sample_weight": "make the dataset's elements (x, y, sample_weight)",
    "batch_size": "batch the dataset, as in hr.keras.dataset(dataset.batch(n))",
    "validation_batch_size": "batch the dataset, as in hr.keras.dataset(dataset.batch(n))",
}


def _check_finite(method: str, data: KerasDataset, given: dict[str, Any], argument: str) -> None:
    # `max_steps_per_epoch` exists only in recent versions of Keras.
    limit = getattr(keras.config, "max_steps_per_epoch", lambda: None)()
    if not data.is_infinite or given.get(argument) or limit:
        return
    raise ValueError(
        f"{method} would never end: the dataset is infinite, and `{argument}` is not given. Pass "
        f"{argument}=n, or use hr.keras.dataset(dataset, steps=n)"
    )


_CHECKS: dict[str, Callable[[dict[str, Any]], None] | None] = {
    "fit": _prepare_fit,
    "evaluate": _prepare_reading("evaluate"),
    "predict": _prepare_reading("predict"),
    "train_on_batch": None,
    "test_on_batch": None,
}
_DISTRIBUTED = frozenset({"fit", "evaluate", "predict"})
_TRAINING = _CHECKS.keys() - {"predict"}
"""Methods that must run on all replicas; predictions are the same in any process."""
