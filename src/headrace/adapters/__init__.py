"""Adapters: datasets as PyTorch, JAX and Keras read them, and tables as they look them up.

* `torch`: what `hr.torch` offers. A loader (`torch_loader`) makes iterators (`torch_iterator`) over
  passes (`torch_loader_epochs`) of this rank's and this process's part (`torch_sharding`); they
  yield tensors (`torch_tensors`), on a device if asked to (`torch_device_transfer`). `torch_epochs`
  numbers the epochs of worker processes that end with each. `torch_datasets` makes datasets of
  PyTorch's.
* `jax`: what `hr.jax` offers. The iterator (`jax_iterator`) takes steps of a dataset
  (`jax_input_steps`), of which `jax_process_input` says who reads which rows, and puts them on
  devices (`jax_placement`); processes that read rows of their own end together
  (`jax_step_agreement`).
* `keras`: what `hr.keras` offers: a dataset for `fit`, `evaluate` and `predict` (`keras_dataset`);
  `keras_batches` says which batches Keras takes, and `keras_fit`
  checks what `fit`, `evaluate` and `predict` are given, and refuses models in scopes.
* `keras_training`: training of Keras models under strategies.
* `torch_tables` and `jax_tables`: rows of tables on parameter servers, and their gradients.
"""
