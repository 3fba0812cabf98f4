"""Training of Keras 3 models under strategies, on the JAX and PyTorch back ends.

* `model_pickling`: models as bytes for another process: the object graph, without values of
  variables.
* `server_optimizers`: optimizers of Keras as optimizers that run on parameter servers.
* `keras_internals`: every private module and attribute of Keras that this package relies on, with
  the versions of Keras that were tried.
* `tensorboard`: a callback that writes metrics and weights for TensorBoard; `event_files` writes
  the files.
* `dataset_creator`: a function that makes the dataset of each input pipeline.
* `sidecar_evaluator`: evaluates the checkpoints that a training program writes; `checkpoint_watch`
  finds the ones that are complete, and `checkpoint_loading` reads them. `best_model_exporter` keeps
  the model with the best metric.
"""
