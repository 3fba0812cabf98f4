"""Compute frameworks: devices, and what becomes of replicas' values on them.

Nothing here is imported before somebody asks for a framework by its name.

* `framework`: the contract, and how one is found by its name
* `numpy`: logical CPUs, on the host; `jax`, `torch`: their devices
* `batch_shards`: rows shared by devices, where they differ: padding, masks
* `jax_global_arrays`: arrays over a mesh of JAX, from rows of each process
* `jax_replica_program`: one program of JAX for all replicas, over a mesh; `jax_waiting`: for its
results
* `jax_workers`: processes of JAX made one program; `jax_coordinator`: the process by which
* `keras_state`: which objects of Keras have state that is trained, found without importing Keras
* `torch_workers`: large tensors of several processes added up by Gloo
"""
