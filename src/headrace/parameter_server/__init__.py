"""Parameter servers: variables and tables in other processes, and optimizers that change them.

The store, without threads, sockets and clocks:

    operations    what a server can be asked
    specs         shards, tables, rules and dtypes, as they are sent
    store         carries operations out
    array_shard   rows of one variable
    table_shard   rows of one table, by id
    table_rows    the columns of a table, the index of ids, and first values
    rules         what optimizers do to values and slots
    write_keys    which writes were carried out, so that each counts once
    acknowledged  which writes a client knows to be acknowledged
    saved         shards as plain values, and what changed since a checkpoint
    snapshots     what is saved of a store, and how it gets that back
    seats         which of two replicas leads

The server:

    server        where it listens
    applying      carries out operations, one after another
    messages      what clients and servers send to each other
    replica       one of two servers with the same store
    saving        the thread that saves and restores
    shard_writer  writes shards to a checkpoint, and reads them for any other shards

The client:

    connection    asks many servers at a time
    lives         which servers are there and lead, and how long to wait for one
    origin        which function writes, so that a write counts once when it runs again
    rounds        functions whose gradients become one step
    strategy      `ParameterServerStrategy`, its settings and names
    v1            a strategy for programs without a coordinator
    current       the clusters of this process, and handles of what is on servers
    partitioners  how variables are cut into shards, and where these go
    creation      makes variables, and sends operations to their shards
    variable      a variable on servers
    reading       a variable as an array
    read_cache    a scope in which a variable is read once
    table         a table of rows for any ids
    table_files   tables in files
    initializers  first values of rows
    optimizer     what all optimizers share
    optimizers    `hr.optimizers`
    optimizer_names  which slots and steps are whose
    counter       how many steps an optimizer took
    schedules     learning rates
    gradients     clips gradients, and sums them by id
    arrays        arrays of any framework; gradients of some rows
    pushing       one step of an optimizer on all servers
    in_background  steps that are pushed while the loop goes on
    background    the thread for that
    pickling      functions and datasets for workers

Checkpoints:

    checkpoint             `hr.Checkpoint`
    checkpoint_tree        the objects of a checkpoint, by path
    checkpoint_objects     saves and restores objects of servers and of this process
    checkpoint_frameworks  objects of Keras, PyTorch and JAX
    checkpoint_format      files of a checkpoint, and the folder of checkpoints
    checkpoints            `hr.CheckpointManager`
    server_files           asks servers to save and restore
"""
