"""How workers share a dataset: one package for each reading mode.

    no_sharding          each worker reads the whole dataset
    static               each worker of a fixed list reads its own share
    dynamic              workers ask for splits of one stream, first come, first served
    ordered              as dynamic, and elements are delivered in the order of the plan
    coordinated_reads    consumers read rounds together, an element each
    cross_trainer_cache  trainers share what the workers produce
    distributed_save     workers write elements to files

A package has up to three parts, each above the core of a process: `policy` for the dispatcher,
which assigns tasks and splits; `delivery` for the worker, which answers requests for elements; and
a session or a source for the client. `dispatcher/policy_selection.py`, `worker/registry.py` and
`client/reader.py` register them.
"""
