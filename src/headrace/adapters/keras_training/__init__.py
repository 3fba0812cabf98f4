"""Training of Keras 3 models under strategies, on the JAX and PyTorch back ends.

How `model.fit` gets to the parameter servers, in the order in which to read:

* `parameter_server_trainer`: `keras_fit` calls it in place of Keras' `fit`, `evaluate` and
  `predict`. It reads batches, schedules a step for each, and calls callbacks with the results.
* `training_data`: the batches of a call, one epoch after another; `hr.keras.DatasetCreator`.
* `model_on_servers`: places a model on servers and workers, and tells each call what it needs.
* `server_weights`: its variables; reads and assignments here go to the servers.
* `optimizer_on_servers`: its optimizer and its slots.
* `server_optimizers`: which optimizer of `hr.optimizers` has the numbers of one of Keras.
* `model_pickling`: the model as bytes for workers: the object graph, without values of variables.
* `worker_calls`: the functions that the coordinator schedules on workers; imports no Keras.
* `worker_model`: a worker's copy. It reads weights, runs a step, and pushes gradients.
* `steps`: a step on any back end; it records gradients, and looks up rows of embeddings.
* `jax_steps`, `torch_steps`: the same on one back end.
* `step_results`: delivers results in the order of the batches, and adds up metrics.
* `backup`: `BackupAndRestore` saves all of that, so that `fit` resumes at the same batch.

Embeddings with too many rows for one process:

* `table_embedding`: `hr.keras.Embedding`, and large layers of `keras.layers.Embedding`.
* `embedding_tables`: the table on the servers, and the files beside those of Keras.
* `distributed_embedding`: many tables and features, as Keras RS describes them.

Models, layers, metrics and optimizers in functions that a coordinator schedules:

* `shared_objects`: the coordinator's side: what is placed on servers and sent to workers.
* `worker_objects`: the worker's side: copies that read from servers and send changes there.

Mirrored replicas, where Keras' own loop runs:

* `mirrored_trainer`: cuts each batch into parts, one for each replica.
* `jax_replicas`, `torch_replicas`: the steps of all parts on one back end.

Callbacks and programs beside training:

* `tensorboard`: metrics and weights for TensorBoard, without TensorFlow.
* `sidecar_evaluator`: evaluates checkpoints as they come; keeps the best model in a file.
* `training_checkpoints`: finds the checkpoints that are complete, and loads them.

What Keras does not document, with the versions that were tried:

* `keras_internals`: of training; also attributes and classes that this package adds.
* `graph_internals`: of pickling.
* `embedding_internals`: of embedding layers, whose reads are noticed.
"""
