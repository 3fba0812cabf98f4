"""Plans: immutable descriptions of dataset steps. Nothing in this package reads, runs or waits.

    node             the base class of steps
    source           the interface of sources; combined_sources (zipped, concatenated, randomized)
    traverse         walks and folds; cardinality, spec, leaves

Steps:

    elements         sources, and their elements by index
    elementwise      map, filter, take_while, scan
    random_map       random_map
    ignoring_errors  ignore_errors
    ordering         shuffle, repeat, take, skip, shard, enumerate
    batching         batch, padded_batch, ragged_batch, unbatch
    unique           unique
    windows          group_by_window, bucket_by_sequence_length
    packing          pack_sequences (whole or split sequences), batch_by_cost
    sliding_windows  window, and a flat_map that batches windows
    combining        zip, concatenate, interleave, sample_from_datasets, choose_from_datasets
    buffering        prefetch, cache
    snapshot         snapshot
    options          with_options
    partition_nodes  steps inserted by `rewrites.partition`

Properties of plans:

    determinism      fixed seeds, unordered steps, states that cannot be saved
    identity         the steps of a plan, as stored in states
    fingerprint      digests of plans, equal if they have the same meaning
    serialize        plans as bytes
    column_proof     proofs that a function can be applied to whole columns
    user_function    calls of user functions and their errors
    random_words     counter-based random numbers
    iteration_counter  iteration numbers of shared jobs
"""
