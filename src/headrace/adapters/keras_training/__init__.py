"""Training of Keras 3 models under strategies, on the JAX and PyTorch back ends.

`model.fit` under a `ParameterServerStrategy`, in reading order:

* `parameter_server_trainer`: replaces Keras' `fit`, `evaluate` and `predict` (called by
  `keras_fit`). It reads batches, schedules a step for each, and calls callbacks with the results.
* `training_data`: the batches of a call, one epoch after another; `hr.keras.DatasetCreator`.
* `model_on_servers`: places a model on servers and workers, and builds the arguments of each call.
* `server_weights`: the model's variables; reads and assignments in this process go to the servers.
* `optimizer_on_servers`: the model's optimizer and its slots.
* `server_optimizers`: converts Keras optimizers to equivalent ones of `hr.optimizers`.
* `model_pickling`: pickles a model for workers: the object graph, without values of variables.
* `worker_calls`: functions that the coordinator schedules on workers; imports no Keras.
* `worker_model`: a worker's copy of the model. It reads weights, runs a step, and pushes gradients.
* `steps`: base class of steps: records gradients, and looks up rows of embeddings.
* `jax_steps`, `torch_steps`: steps on one back end.
* `step_results`: delivers results in batch order, and adds up metrics.
* `backup`: `BackupAndRestore` of the state of training, so that `fit` resumes at the same batch.

Embeddings with too many rows for one process:

* `table_embedding`: `hr.keras.Embedding`, and large layers of `keras.layers.Embedding`.
* `embedding_tables`: the table on the servers, and its files next to those of Keras.
* `distributed_embedding`: many tables and features, with the configuration classes of Keras RS.

Models, layers, metrics and optimizers in functions that a coordinator schedules:

* `shared_objects`: the coordinator's side: placement on servers, and pickling for workers.
* `worker_objects`: the worker's side: copies that read from the servers and push changes.

`fit` and `evaluate` on mirrored replicas, in Keras' own training loop:

* `mirrored_trainer`: splits each batch into pieces, one for each replica.
* `jax_replicas`, `torch_replicas`: the steps of all pieces on one back end.

Callbacks and programs that run next to training:

* `tensorboard`: metrics and weights for TensorBoard, without TensorFlow.
* `sidecar_evaluator`: evaluates checkpoints as they are written; exports the best model.
* `training_checkpoints`: finds complete checkpoints and loads them.

Undocumented parts of Keras that this package relies on, with the tested versions:

* `keras_internals`: training; also attributes and classes that this package adds.
* `graph_internals`: pickling.
* `embedding_internals`: embedding layers, and detection of reads of their matrices.
"""
