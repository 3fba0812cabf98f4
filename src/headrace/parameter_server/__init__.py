"""Parameter servers: variables and tables in other processes, and optimizers that update them.

The store, without threads, sockets and clocks:

    operations    operations of a server and their answers
    specs         shards, tables, rules and dtypes, as they are sent
    store         executes operations, takes and restores snapshots
    array_shard   rows of one variable
    table_shard   rows of one table, by id
    table_rows    columns of a table, index of ids, and initial values
    rules         optimizer updates of values and slots
    write_keys    keys of executed writes, so that each is applied once
    shard_values  shards as plain values, and changes since a checkpoint
    replica_state  roles and positions of the replicas of a store

The server:

    server        the server process's endpoint
    operation_executor  executes operations, one after another
    messages      messages between clients and servers
    store_replica  one replica of a store on two servers
    checkpoint_thread  the thread that saves and restores
    shard_files   writes shards to a checkpoint, and reads them in any partitioning

The client:

    server_requests  batched requests to many servers
    server_states  states and leaders of servers, and retries
    write_context  identity of a function's writes, so that each is applied once
    strategy      `ParameterServerStrategy`, its settings and names
    v1            a strategy for programs without a coordinator
    cluster_registry  clusters of this process, handles, and the background thread
    partitioners  partitioning of variables, and placement of shards
    variable_shards  creation of variables, and requests to their shards
    variable      a variable on servers, readable as an array
    read_cache    a scope in which each variable is read once
    table         embedding tables, also in files
    initializers  initial values of rows
    optimizer     base of optimizers, step counter, and `InBackground`
    optimizers    `hr.optimizers`
    schedules     learning-rate schedules
    gradients     clipping, and sums by id
    arrays        arrays of any framework; sparse gradients
    optimizer_steps  optimizer steps on all servers, and their means
    pickling      functions and datasets for workers

Checkpoints:

    checkpoint_tree     objects of a checkpoint, by path; those of Keras, PyTorch and JAX
    checkpoint_objects  saves and restores objects of servers and of this process
    checkpoint_format   files of a checkpoint, and directories of checkpoints
    checkpoints         `hr.Checkpoint` and `hr.CheckpointManager`
    checkpoint_requests  save and restore requests to servers
"""
