"""Compute frameworks (NumPy, JAX, PyTorch): their devices and arrays, as strategies use them.

A framework's module is imported only when the framework is requested by name.

* `framework`: the interface `Framework`, and the look-up of frameworks by name
* `numpy`: logical CPUs that share the host's memory; `jax`, `torch`: the devices of JAX and PyTorch
* `batch_shards`: shards of a batch with different numbers of rows: padding and masks
* `jax_global_arrays`: global arrays over a JAX mesh, made from the rows of each process
* `jax_replica_program`: one JAX program for all replicas of a mesh; `jax_waiting`: waits for its
  results
* `jax_workers`: forms one JAX program from several processes; `jax_coordinator`: the process that
  runs JAX's coordination service for them
* `keras_state`: recognizes Keras objects with trainable state, without importing Keras
* `torch_workers`: sums of large tensors over several processes with Gloo
"""
