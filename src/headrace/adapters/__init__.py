"""Adapters of datasets and embedding tables for PyTorch, JAX, Keras and Grain.

* `torch`: the public names of `hr.torch`. A loader (`torch_loader`) makes iterators
  (`torch_iterator`) over epochs (`torch_loader_epochs`) of the shard of this rank and worker
  process (`torch_sharding`), so that ranks end together (`torch_full_rounds`); they yield tensors
  (`torch_tensors`), optionally on a device (`torch_device_transfer`). `torch_epochs` numbers
  the epochs of worker processes that end with each epoch. `torch_datasets` converts PyTorch
  datasets to Headrace datasets.
* `jax`: the public names of `hr.jax`. The iterator (`jax_iterator`) reads the steps of a dataset
  (`jax_input_steps`); `jax_process_input` determines which rows each process reads. It puts them on
  devices (`jax_placement`); processes that read different rows agree on each step, so that they end
  together (`jax_step_agreement`).
* `keras`: the public names of `hr.keras`: a dataset for `fit`, `evaluate` and `predict`
  (`keras_dataset`); `keras_batches` checks the batches, and `keras_fit` checks the arguments of
  `fit`, `evaluate` and `predict`, and rejects models in scopes.
* `grain`: the public names of `hr.grain`: an `IterDataset` (`grain_datasets`) and a data source
  with random access (`grain_source`) over a dataset.
* `keras_training`: training of Keras models under strategies.
* `torch_tables` and `jax_tables`: look-up of embedding table rows, and their gradients.
"""
