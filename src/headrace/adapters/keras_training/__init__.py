"""Training of Keras 3 models under strategies, on the JAX and PyTorch back ends.

* `parameter_server_trainer`: `fit`, `evaluate` and `predict` under a `ParameterServerStrategy`. It
  reads batches (`training_data`), has training workers compute steps, delivers their results in
  order (`step_scheduler`), adds up metrics (`metric_totals`), scales the loss (`loss_scale`) and
  calls callbacks. `backup` saves all of that, and restores it.
* `server_weights`: the variables of a model on parameter servers, as the coordinator sees them.
  `linked_variables` has reads and assignments of a Keras variable go to them.
* `shared_objects`: models, optimizers, metrics and variables in functions that a coordinator
  schedules. `object_specs` describes them to workers, and `worker_objects` are the copies there.
* `worker_model`: the copy of a model on a training worker. `jax_steps` and `torch_steps` run one
  of the `steps` of it on their back end, with an optimizer that records gradients
  (`gradient_recorder`).
* `embedding_rows`: looks up the rows of a batch on the servers for `Embedding` layers of such a
  copy (`rows`), in place of all of their matrix; `jax_rows` and `torch_rows` do it on their back
  end.
* `table_embedding`: a layer with a row for any id, whose rows are in a table on parameter servers.
  `distributed_embedding` has many of them, for features as Keras RS describes them.
  `large_embeddings` gives large `keras.layers.Embedding` such a table, too. `embedding_tables`
  makes the table, and refuses what needs all of its rows; `table_saving` saves it beside the files
  of Keras.
* `mirrored_trainer`: `fit` and `evaluate` under a `MirroredStrategy` or
  `MultiWorkerMirroredStrategy`, by Keras' own loop. `replica_steps` is what it calls for a batch,
  `jax_replicas` and `torch_replicas` on their back end.
* `model_pickling`: models as bytes for another process: the object graph, without values of
  variables.
* `server_optimizers`: optimizers of Keras as optimizers that run on parameter servers;
  `optimizer_on_servers` keeps the one of each, and `optimizer_slots` copies slots there and back.
* `strategy_of_model`: which strategy a model belongs to.
* `keras_internals`: every private module and attribute of Keras that this package relies on, with
  the versions of Keras that were tried.
* `tensorboard`: a callback that writes metrics and weights for TensorBoard; `event_files` writes
  the files.
* `dataset_creator`: a function that makes the dataset of each input pipeline.
* `sidecar_evaluator`: evaluates the checkpoints that a training program writes; `checkpoint_watch`
  finds the ones that are complete, and `checkpoint_loading` reads them. `best_model_exporter` keeps
  the model with the best metric.
"""
