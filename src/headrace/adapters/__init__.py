"""Adapters: datasets as PyTorch, JAX and Keras read them, and tables as they look them up.

* `torch`: what `hr.torch` offers. A loader (`torch_loader`) makes iterators (`torch_iterator`) over
  passes (`torch_passes`) of this rank's and this process's part (`torch_share`, `rounds`); they
  yield tensors (`torch_tensors`), on a device if asked to (`torch_device`; `moved`: the step of a
  plan that sends them). `torch_datasets` makes datasets of PyTorch's.
* `jax`: the iterator over devices. `jax_sharing` says who reads which rows, `jax_steps` cuts them,
  `jax_placement` puts them on devices, `jax_agreement` has processes end together, by words in the
  `jax_store`.
"""
