"""Simulation of the data service: real cores and sessions in virtual time.

Kernel, also used for the coordinator and the collectives
    kernel.py       clock, events, processes, faults and trace
    network.py      connections with delays, partitions and losses

Processes of the data service
    dispatcher.py   core and journal of the dispatcher
    worker.py       core of a worker and its producers
    client.py       read session of a client and its consumer
    production.py   stand-ins for the engine: splits in, result batches or files out

Runs of the data service
    scenario.py     scenario of each seed
    cluster.py      processes of a run, and the run itself
    faults.py       injected faults
    invariants.py   invariants of all modes

Modes with their own processes, job options or invariants
    coordinated_reads.py  cross_trainer_cache.py  distributed_save.py  static_sharding.py

`python -m tests.simulation SEED` runs a seed again. A new kind of process is a subclass of
`Process` in its own file; a new mode is a subclass of `Cluster` in its own file, listed in
`__main__.py`.
"""
