"""`hr.keras.DistributedEmbedding`: tables and features as `keras_rs.layers` describes them."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import keras

from headrace.adapters.keras_training.table_embedding import (
    Embedding,
    check_combiner,
    config_of_initializer,
    output_shape,
)
from headrace.parameter_server import initializers
from headrace.parameter_server.table import EmbeddingTable

__all__ = ["DistributedEmbedding"]


@dataclasses.dataclass(frozen=True)
class _Feature:
    """One feature, as a leaf of the nested structure of features.

    Attributes:
        name: Name of the feature.
        table: Index of its table.
        combiner: None with `max_sequence_length`.
        input_shape: Shape of its ids, with the batch axis; None accepts any.
        output_shape: Shape of its activations, with the batch axis; None derives it.
        max_sequence_length: Number of rows to return, not combined; 0 combines all of them.
    """

    name: str
    table: int
    combiner: str | None
    input_shape: tuple[int | None, ...] | None
    output_shape: tuple[int | None, ...] | None
    max_sequence_length: int


@keras.saving.register_keras_serializable(package="headrace")
class _BoundedTable(Embedding):
    """A table with ids from 0 to `input_dim - 1`, from a `keras_rs.layers.TableConfig`."""

    def __init__(self, input_dim: int, output_dim: int, **arguments: Any) -> None:
        super().__init__(output_dim, **arguments)
        self.input_dim = int(input_dim)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "input_dim": self.input_dim}


@keras.saving.register_keras_serializable(package="headrace")
class DistributedEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """Looks up features in tables on parameter servers, described as in Keras RS.

        users = keras_rs.layers.TableConfig("users", 1_000_000, 16, combiner="sum")
        features = {
            "user": keras_rs.layers.FeatureConfig("user", users, (64, 1), (64, 16)),
            "friends": keras_rs.layers.FeatureConfig("friends", users, (64, 8), (64, 16)),
        }
        activations = hr.keras.DistributedEmbedding(features)(ids)   # a dict like `features`

    Any objects with these attributes do; Keras RS need not be installed. Features whose `table` is
    the same object share one table. Rows are made, looked up and trained as those of
    `hr.keras.Embedding`, and ids without a row have its first values in evaluation and prediction.

    Of a table `name`, `vocabulary_size`, `embedding_dim`, `initializer` and `combiner` count. A
    `VarianceScaling` initializer with mode "fan_out", the default, becomes a normal or uniform
    distribution of the same deviation. The optimizer of the model trains all tables, so
    `optimizer` must be the default, "adam", which stands for it. Of a feature `name`, `table`,
    `input_shape` and `output_shape` count, and `max_sequence_length` if there is one: the
    number of rows to return uncombined, cut or filled with zeros.

    >>> from types import SimpleNamespace
    >>> users = SimpleNamespace(
    ...     name="users", vocabulary_size=1000, embedding_dim=4, initializer=None, combiner="sum"
    ... )
    >>> features = {"user": SimpleNamespace(name="user", table=users)}
    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         layer = hr.keras.DistributedEmbedding(features)
    ...     strategy.close()
    >>> layer.name
    'distributed_embedding'

    Args:
        feature_configs: A `FeatureConfig`, or a nested structure of them.
        name: Name of the layer.
        dtype: A dtype or dtype policy of Keras.

    Call arguments:
        inputs: Ids, in the structure of `feature_configs`.
        weights: Weights of the ids, in the same structure; None: all count alike.

    Raises:
        ValueError: If a setting is not supported; the message names it.
    """

    def __init__(
        self, feature_configs: Any, *, name: str | None = None, dtype: Any = None, **keras_args: Any
    ) -> None:
        super().__init__(name=name, dtype=dtype, autocast=False, **keras_args)
        found: dict[int, int] = {}
        tables: list[Any] = []

        def feature(config: Any) -> _Feature:
            table = config.table
            if id(table) not in found:
                if any(table.name == each.name for each in tables):
                    raise ValueError(
                        f"two tables have the name {table.name!r}: features share a table if their "
                        "`table` is the same object"
                    )
                found[id(table)] = len(tables)
                tables.append(table)
            return _feature(config, found[id(table)])

        features = keras.tree.map_structure(feature, feature_configs)
        # As it is: Keras would replace containers by its own, also in what is returned.
        object.__setattr__(self, "_features", features)
        self._tables = [_table(each, self.dtype_policy) for each in tables]

    @property
    def tables(self) -> dict[str, EmbeddingTable]:
        """The tables on the servers, by their names in the configuration."""
        return {layer.name: layer.table for layer in self._tables}

    def build(self, input_shape: Any = None) -> None:
        """Make the variables that stand for rows of tables."""
        for layer in self._tables:
            layer.build()
        self.built = True

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Look up the rows of all features, and combine them."""

        def activations(feature: _Feature, ids: Any, weights: Any = None) -> Any:
            layer = self._tables[feature.table]
            length = feature.max_sequence_length
            if not length:
                return layer.embed(ids, weights, feature.combiner)
            rows = layer.embed(ids[:, :length], None, None)
            missing = length - rows.shape[1]
            return keras.ops.pad(rows, ((0, 0), (0, missing), (0, 0))) if missing else rows

        if weights is None:
            return keras.tree.map_structure_up_to(
                self._features, activations, self._features, inputs
            )
        return keras.tree.map_structure_up_to(
            self._features, activations, self._features, inputs, weights
        )

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Return shapes and dtypes of the activations."""

        def spec(feature: _Feature, ids: Any) -> Any:
            _check_shape(feature, "input_shape", feature.input_shape, ids.shape)
            dim = self._tables[feature.table].output_dim
            shape = output_shape(ids.shape, dim, feature.combiner)
            if feature.max_sequence_length:
                shape = (ids.shape[0], feature.max_sequence_length, dim)
            _check_shape(feature, "output_shape", feature.output_shape, shape)
            return keras.KerasTensor(shape, self.compute_dtype)

        return keras.tree.map_structure_up_to(self._features, spec, self._features, inputs)

    def get_config(self) -> dict[str, Any]:
        """Return the configuration as values of JSON."""
        return {
            **super().get_config(),
            # As strings: leaves of the structure.
            "feature_configs": keras.tree.map_structure(
                lambda feature: json.dumps(dataclasses.asdict(feature)), self._features
            ),
            "tables": [
                {
                    "name": layer.name,
                    "vocabulary_size": layer.input_dim,
                    "embedding_dim": layer.output_dim,
                    "initializer": config_of_initializer(layer.initializer),
                }
                for layer in self._tables
            ],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DistributedEmbedding:
        """Return the layer of a configuration."""
        config = dict(config)
        tables = [SimpleNamespace(**each) for each in config.pop("tables")]

        def feature(packed: str) -> Any:
            values = json.loads(packed)
            table = tables[values.pop("table")]
            return SimpleNamespace(table=table, **values)

        config["feature_configs"] = keras.tree.map_structure(feature, config["feature_configs"])
        return cls(**config)


def _feature(config: Any, table: int) -> _Feature:
    length = int(getattr(config, "max_sequence_length", 0) or 0)
    combiner = None
    if not length:
        combiner = getattr(config, "combiner", None) or getattr(config.table, "combiner", "mean")
        check_combiner(combiner)
    return _Feature(
        config.name,
        table,
        combiner,
        _shape(getattr(config, "input_shape", None)),
        _shape(getattr(config, "output_shape", None)),
        length,
    )


def _table(config: Any, dtype: Any) -> _BoundedTable:
    optimizer = getattr(config, "optimizer", None)
    if optimizer not in (None, "adam"):
        raise ValueError(
            f"`optimizer` of the table {config.name!r} is {optimizer!r}, but the optimizer of the "
            "model trains all tables: omit it, and pass the optimizer to model.compile"
        )
    placement = getattr(config, "placement", "auto")
    if placement not in ("auto", "default_device"):
        raise ValueError(
            f"`placement` of the table {config.name!r} is {placement!r}, but tables are on "
            'parameter servers: use "auto"'
        )
    return _BoundedTable(
        config.vocabulary_size,
        config.embedding_dim,
        name=config.name,
        initializer=_initializer(getattr(config, "initializer", "uniform"), config.embedding_dim),
        dtype=dtype,
    )


def _initializer(given: Any, dim: int) -> Any:
    """Return an initializer of Keras as one that servers have, if it is known by its deviation."""
    if isinstance(given, dict | int | float):
        return given
    if isinstance(given, str) and given not in ("uniform", "normal", "zeros"):
        given = keras.initializers.get(given)
    if not isinstance(given, keras.initializers.VarianceScaling) or given.mode != "fan_out":
        return given
    deviation = math.sqrt(given.scale / dim)
    seed = given.get_config().get("seed") or 0
    if given.distribution == "uniform":
        return initializers.Uniform(-math.sqrt(3) * deviation, math.sqrt(3) * deviation, seed)
    return initializers.Normal(0.0, deviation, seed)


def _shape(shape: Any) -> tuple[int | None, ...] | None:
    return None if shape is None else tuple(shape)


def _check_shape(
    feature: _Feature, argument: str, expected: tuple[int | None, ...] | None, shape: Any
) -> None:
    """Raise ValueError where a shape is another one; the batch does not count."""
    if expected is None:
        return
    pairs = list(zip(expected[1:], tuple(shape)[1:], strict=False))
    if len(expected) != len(shape) or any(
        None not in pair and pair[0] != pair[1] for pair in pairs
    ):
        raise ValueError(
            f"`{argument}` of the feature {feature.name!r} is {expected}, but the shape is "
            f"{tuple(shape)}"
        )
