"""Parameter servers: variables and tables in other processes, and optimizers that change them.

The store, without threads, sockets and clocks:

    operations    what a server can be asked
    specs         shards, tables, rules and dtypes, as they are sent
    store         carries operations out, and takes and restores snapshots
    array_shard   rows of one variable
    table_shard   rows of one table, by id
    table_rows    the columns of a table, the index of ids, and first values
    rules         what optimizers do to values and slots
    write_keys    which writes were carried out, so that each counts once
    shard_values  shards as plain values, and what changed since a checkpoint
    replica_state  which of two replicas leads, and which operations each has

The server:

    server        where it listens
    operation_executor  carries out operations, one after another
    messages      what clients and servers send to each other
    store_replica  one of two servers with the same store
    checkpoint_thread  the thread that saves and restores
    shard_files   writes shards to a checkpoint, and reads them for any other shards

The client:

    server_requests  asks many servers at a time
    server_states  which servers are there and lead, and how long to wait for one
    write_context  which function writes, so that a write counts once when it runs again
    strategy      `ParameterServerStrategy`, its settings and names
    v1            a strategy for programs without a coordinator
    cluster_registry  the clusters of this process, handles, and the thread for background work
    partitioners  how variables are cut into shards, and where these go
    variable_shards  makes variables, and sends operations to their shards
    variable      a variable on servers, read as an array
    read_cache    a scope in which a variable is read once
    table         a table of rows for any ids, and tables in files
    initializers  first values of rows
    optimizer     what all optimizers share, their count of steps, and `InBackground`
    optimizers    `hr.optimizers`
    schedules     learning rates
    gradients     clips gradients, and sums them by id
    arrays        arrays of any framework; gradients of some rows
    optimizer_steps  steps of optimizers on all servers, and the mean of several
    pickling      functions and datasets for workers

Checkpoints:

    checkpoint_tree     the objects of a checkpoint, by path; those of Keras, PyTorch and JAX
    checkpoint_objects  saves and restores objects of servers and of this process
    checkpoint_format   files of a checkpoint, and the folder of checkpoints
    checkpoints         `hr.Checkpoint` and `hr.CheckpointManager`
    checkpoint_requests  asks servers to save and restore
"""
