"""Parameter servers: variables and tables in other processes, and what changes them.

What a server does is pure:

* `operations` has a record for each thing that it can be asked, and `specs` what they speak of;
  `dtypes` names numbers.
* `store` carries them out. An `array_shard` is a run of a variable's rows; a `table_shard` has rows
  (`table_rows`) for ids (`id_table`), which begin with their `first_values`. `rules` are what
  optimizers do to both; `write_keys` knows what was carried out already.
* `snapshots` takes a store apart into `saved` values, whole or what was `touched` since a mark.
  `checkpoint_format` is what is on disk; `assembling` makes shards from pieces of any others.

What a client computes:

* `partitioners` cut a variable into shards, and `placement` deals them to servers.
* `optimizers` are handles with numbers (`optimizer` is what they share, `schedules` their learning
  rates, a `counter` their steps, `optimizer_names` whose those are); `gradients`
  are clipped, and `sums` brings ids together and to their shards.

Between the two:

* `server` is the shell: a port, and the one thread that carries out operations (`applying`), as
  `messages` ask for them. `connection` asks many servers at a time, `asking` each of them, with
  `patience`; `repeating` says what may be asked twice, and `lives` when a server was started again.
  `gauges` are for who looks on.
* A store may be on two servers: `seats` are pure, and say which of the two leads; a `replica` is
  one of them in its server, a `mirror` has the other do what the leading one did, and `leaders` is
  what clients know of it. `acknowledged` says which writes a client knows to be acknowledged.
* `saving` is the server's other thread: `shard_writer` writes shards to a `tensor_file` while they
  are in use, `shard_reader` puts them back.
* `origin` says which closure writes, so that a write is carried out once; `closure_servers` when
  that may be forgotten, and who may not write. `rounds` are closures whose steps become one.

What users hold:

* `strategy` says which servers there are (`cluster_check`) and how it works (`settings`); what is
  made in its scope is placed on them, beside something else if asked (`extended`), under the
  `names` that it gives; `v1` is for programs without a coordinator. `current` knows what handles
  mean in this process.
* `variable` is a handle of a variable, and `reading` what it shows as an array, once in the
  scope of a `read_cache`: `creation` makes it, `sharded` asks its shards. `table` is one of rows
  for any ids, with first values by `initializers`; `pulling` asks for rows of many tables,
  `table_files` keeps them in a file.
* `pushing` is one step of an optimizer, over all of them; gradients of some rows are
  `indexed_slices`, and `arrays` may be of any framework. `in_background` does it
  while a loop goes on, on a thread of the `background`, or a function, on its own.
* `checkpoint` saves and restores objects of a program: its `checkpoint_tree` says which and how,
  `checkpoint_objects` what servers and this process do of it, and `server_files` asks servers.
  `checkpoint_frameworks` restores objects of Keras, PyTorch and JAX, `checkpoint_optimizers` the
  steps and slots of optimizers, and `checkpoint_local` puts objects of this process back if one
  of them fails.
  `checkpoints` are saved again and again, in a `checkpoint_folder`, and given back to a server that
  was lost.
* `per_worker_input` is a dataset that workers are to read; `pickling` makes functions ready for
  them.
"""
