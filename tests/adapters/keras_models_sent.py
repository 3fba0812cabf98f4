"""Models that `test_keras_model_pickling.py` sends to another process; run as a program.

    python keras_models_sent.py FOLDER

It writes a pickle of one record for each model: its bytes, its values, and what it computes here.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import keras
import numpy as np
from keras import layers, ops

from headrace.adapters.keras_training.model_pickling import dump_model

BACK_END = keras.backend.backend()
RNG = np.random.default_rng(0)
ROWS = 16
SCALE = 2.0


def floats(*shape):
    return RNG.normal(size=(ROWS, *shape)).astype(np.float32)


X, Y, IMAGES = floats(4), floats(1), floats(8, 8, 3)
IDS = RNG.integers(0, 20, (ROWS, 5)).astype(np.int32)


class Perceptron(keras.Model):
    """Has constructor arguments, no `get_config`, and collections that Keras tracks."""

    def __init__(self, units, activation):
        super().__init__()
        self.blocks = [layers.Dense(units, activation=activation) for _ in range(2)]
        self.heads = {"last": layers.Dense(1)}
        self.normalization = layers.BatchNormalization()
        self.dropout = layers.Dropout(0.3)
        self.offset = np.float32([0.5])
        self.table = {"a": [1, (2, {"b": 3})]}

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x)
        x = self.dropout(self.normalization(x, training=training), training=training)
        return self.heads["last"](x) * SCALE + ops.convert_to_tensor(self.offset)


class Gated(layers.Layer):
    def __init__(self, units, fn):
        super().__init__()
        self.units = units
        self.fn = fn

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.gate = self.add_weight(shape=(), initializer="ones", trainable=False, name="gate")

    def call(self, x):
        self.add_loss(0.01 * ops.mean(ops.square(self.kernel)))
        return self.gate * self.fn(ops.matmul(x, self.kernel))


class Stepper(keras.Model):
    """Has a custom `train_step`, written for each back end."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.dense = layers.Dense(1)
        self.steps = keras.metrics.Sum(name="steps")

    def call(self, x):
        return self.dense(x)

    if BACK_END == "torch":

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.factor * ops.mean(ops.square(self(x) - y))
            loss.backward()
            gradients = [v.value.grad for v in self.trainable_weights]
            self.optimizer.apply(gradients, self.trainable_weights)
            self.steps.update_state(1.0)
            return {"loss": loss, "steps": self.steps.result()}

    else:

        def train_step(self, state, data):
            import jax  # noqa: PLC0415 - only here

            trained, others, slots, metrics = state
            x, y = data

            def compute_loss(trained):
                outputs, updated = self.stateless_call(trained, others, x)
                return self.factor * ops.mean(ops.square(outputs - y)), updated

            (loss, others_now), gradients = jax.value_and_grad(compute_loss, has_aux=True)(trained)
            trained, slots = self.optimizer.stateless_apply(slots, gradients, trained)
            steps = len(self.steps.variables)
            first = [v.path for v in self.metrics_variables].index(self.steps.variables[0].path)
            counted = self.steps.stateless_update_state(metrics[first : first + steps], 1.0)
            metrics = [*metrics[:first], *counted, *metrics[first + steps :]]
            logs = {"loss": loss, "steps": self.steps.stateless_result(counted)}
            return logs, (trained, others_now, slots, metrics)


class Ridge(keras.regularizers.Regularizer):
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * ops.sum(ops.square(x))


class Huge(keras.losses.Loss):
    def __init__(self, power):
        super().__init__()
        self.power = power

    def call(self, y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred) ** self.power, axis=-1)


class Bias(keras.metrics.Metric):
    def __init__(self, sign):
        super().__init__(name="bias")
        self.sign = sign
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(self.sign * ops.sum(y_pred - y_true))

    def result(self):
        return self.total + 0.0


def largest(y_true, y_pred):
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


def compiled(model, optimizer="sgd", loss="mse", metrics=("mae",), **options):
    model.compile(optimizer, loss, metrics=metrics and list(metrics), **options)
    return model


def sequential():
    return compiled(keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(1)]))


def two_inputs_and_outputs():
    left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
    shared = layers.Dense(3, name="shared")
    joined = layers.Concatenate()([shared(left), shared(right)])
    one = layers.Dense(1, name="one")(ops.relu(joined) * 2)
    two = layers.Dense(1, name="two")(joined[:, :2])
    model = compiled(
        keras.Model({"left": left, "right": right}, {"one": one, "two": two}),
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 100)),
        {"one": "mse", "two": "mae"},
        None,
        loss_weights={"one": 1.0, "two": 0.5},
        weighted_metrics={"one": ["mae"], "two": [keras.metrics.RootMeanSquaredError()]},
        steps_per_execution=2 if BACK_END == "jax" else 1,
        jit_compile=False,
    )
    return model, {"left": X, "right": X[::-1]}, {"one": Y, "two": -Y}


def subclassed():
    return compiled(Perceptron(5, lambda x: ops.tanh(x) * SCALE), "adam")


def custom_train_step():
    model = Stepper(3.0)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def convolutional():
    model = keras.Sequential(
        [
            layers.Conv2D(4, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
        ]
    )
    return compiled(model, run_eagerly=True), IMAGES, Y


def recurrent():
    model = keras.Sequential(
        [
            layers.Embedding(20, 6, mask_zero=True),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True, dropout=0.2)),
            layers.RNN([layers.GRUCell(3), layers.GRUCell(2)]),
            layers.Dense(1),
        ]
    )
    return compiled(model, "rmsprop"), IDS, Y


def gated_recurrent():
    return compiled(keras.Sequential([layers.GRU(3), layers.Dense(1)])), floats(5, 4), Y


def attention():
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(20, 8)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x))
    output = layers.Dense(1)(layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(tokens, output), keras.optimizers.AdamW(clipnorm=1.0)), IDS, Y


def normalized():
    normalization = layers.Normalization()
    normalization.adapt(3 * X + 1)
    layer = layers.Lambda(lambda x: x * SCALE)
    constant = layers.Normalization(axis=None, mean=1.0, variance=2.0)
    return compiled(keras.Sequential([normalization, layer, constant, layers.Dense(1)]))


def nested():
    encoder = keras.Sequential([layers.Dense(4), layers.Dropout(0.2)], name="encoder")
    inputs = keras.Input((4,))
    decoder = keras.Model(inputs, layers.Dense(2)(inputs), name="decoder")
    x = decoder(encoder(encoder(inputs)))
    return compiled(keras.Model(inputs, layers.Dense(1)(x)))


def augmented():
    model = keras.Sequential(
        [
            layers.RandomFlip(),
            layers.Rescaling(0.5),
            layers.GaussianNoise(0.1),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    return compiled(model), IMAGES, Y


def mixed_precision():
    policy = keras.DTypePolicy("mixed_float16")
    dense = [layers.Dense(8, dtype=policy), layers.Dense(1, dtype=policy)]
    model = keras.Sequential(dense)
    model.dtype_policy = policy
    return compiled(model, keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)))


def regularized():
    model = keras.Sequential(
        [
            Gated(6, lambda x: ops.relu(x)),
            layers.Dense(
                3,
                kernel_regularizer=keras.regularizers.L1L2(0.1, 0.1),
                bias_constraint="non_neg",
                activity_regularizer="l2",
            ),
            layers.Dense(1, kernel_regularizer=Ridge(0.1)),
        ]
    )
    optimizer = keras.optimizers.Nadam(0.01, use_ema=BACK_END == "torch")
    return compiled(model, optimizer)


def custom_losses_and_metrics():
    model = keras.Sequential([layers.Dense(1)])
    return compiled(model, "sgd", Huge(1.5), [Bias(-1.0), largest, keras.metrics.R2Score()])


def loss_of_a_lambda():
    model = keras.Sequential([layers.Dense(1)])
    return compiled(model, loss=lambda y, p: ops.mean((y - p) ** 4, axis=-1), metrics=[])


def frozen():
    model = keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])
    model.layers[0].trainable = False
    model.layers[1].trainable = False
    return compiled(model, keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))


def module_of_torch():
    import torch  # noqa: PLC0415 - only here

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    return compiled(keras.Sequential([layers.TorchModuleWrapper(module)]))


MODELS = [
    sequential,
    two_inputs_and_outputs,
    subclassed,
    custom_train_step,
    convolutional,
    recurrent,
    gated_recurrent,
    attention,
    normalized,
    nested,
    augmented,
    mixed_precision,
    regularized,
    custom_losses_and_metrics,
    loss_of_a_lambda,
    frozen,
    *([module_of_torch] if BACK_END == "torch" else []),
]


def values(model):
    return [keras.ops.convert_to_numpy(v).copy() for v in model.variables]


def description(model):
    """Describe the variables, layers and compilation of a model."""
    found = {
        kind: [(v.path, v.shape, v.dtype, v.trainable) for v in getattr(model, kind)]
        for kind in (
            "variables",
            "trainable_variables",
            "non_trainable_variables",
            "metrics_variables",
        )
    }
    found["layers"] = [
        (each.name, type(each).__name__, each.trainable, each.built, each.dtype_policy.name)
        for each in model._flatten_layers()
    ]
    found["compile"] = (
        model.steps_per_execution,
        model.jit_compile,
        model.run_eagerly,
        [metric.name for metric in model.metrics],
    )
    found["optimizer"] = {
        name: value if isinstance(value, (int, float, str, bool, type(None))) else repr(type(value))
        for name, value in model.optimizer.get_config().items()
    }
    if BACK_END == "torch":
        parameters = {id(each) for each in model.parameters()}
        found["parameters"] = [id(v.value) in parameters for v in model.variables]
        found["other_parameters"] = len(parameters - {id(v.value) for v in model.variables})
        found["gradients"] = [v.value.requires_grad for v in model.variables]
    return found


def fitted(model, x, y):
    keras.utils.set_random_seed(1)  # PyTorch draws masks of dropout from its own generator
    return model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history


def main(folder: Path) -> None:
    records = {}
    for make in MODELS:
        model, x, y = made if isinstance(made := make(), tuple) else (made, X, Y)
        outputs = model.predict(x, verbose=0)
        record = {"x": x, "y": y, "outputs": outputs, "data": dump_model(model)}
        record |= {"description": description(model), "values": values(model)}
        problems = []
        if dump_model(model) != record["data"]:
            problems.append("dumped twice, the bytes differ")
        record["losses"] = fitted(model, x, y)
        record["trained_description"] = description(model)
        record["trained_data"] = dump_model(model)
        record["trained_values"] = values(model)
        record["evaluated"] = model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        fitted(model, x, y)
        if dump_model(model) != record["trained_data"]:
            problems.append("after more training, the bytes differ")
        records[make.__name__] = record | {"problems": problems}
        keras.utils.clear_session(free_memory=False)
    (folder / "records.pickle").write_bytes(pickle.dumps(records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
