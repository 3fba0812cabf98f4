"""The simulation kernel, and the data service on it: real cores and sessions, in virtual time.

The kernel, which the coordinator and the collectives use as well
    kernel.py       the clock, the events, processes, faults, the trace
    network.py      connections: late, cut off for a while, or lost

The data service, one file for each kind of process
    dispatcher.py   the dispatcher's core and journal
    worker.py       a worker's session and its producers
    client.py       a client's session and its consumer
    production.py   stand-ins for the engine: units in, portions or files out

Runs of the data service
    scenario.py     what a seed stands for
    cluster.py      who takes part, and one run from the first event to the last check
    faults.py       what goes wrong
    invariants.py   what must hold all the same, in every mode

Modes that have processes, terms or invariants of their own
    coordinated_reads.py  cross_trainer_cache.py  distributed_save.py  static_sharding.py

`python -m tests.simulation SEED` runs a seed again. A new kind of process is a `Process` in a file
of its own; a new mode is a `CoordinatorCluster` in a file of its own, named in `__main__.py`.
"""
