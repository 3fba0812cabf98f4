"""Iterators that execute the nodes of a plan.

    build            iterator of a plan (the only entry point); whether a step opens files
    iterator         interface of all iterators, registry by node type, instrumentation hook
    context          state shared by the iterators of one plan; iteration names of shared jobs

Building blocks of steps:

    input_buffer     reads an input in exact amounts; adapts the number of elements per read
    step_iterator    base classes of steps over one input; a `RowStepIterator` takes five lines
    replayable_input  finds the elements that a step holds again after a restore
    held_input       reads element by element for a step that holds some of them
    element_numbers  numbers of elements; merges parts of several chunks
    threads          read-ahead thread, job threads, waits that log what they wait for
    thread_tuning    number of threads for AUTOTUNE

Measurement of running plans:

    step_registry    what a thread does, from its stack
    statistics       elements, bytes and times of each step
    sampling         samples of threads at random moments
    bottleneck       what limits the speed
    pipeline_model   capacities of the resources of a pipeline
    what_if          what a change of a pipeline would bring
    diagnosis        the bottleneck of a pipeline, and the effects of changes

Steps, by the file in `plan/` that describes them:

    elements         elements (numbers, rows), reading (files, generators)
    elementwise      elementwise (whole columns), scanning, parallel_map with parallel_calls
    random_map       random_map (words and generators)
    ignoring_errors  ignoring_errors with error_counter
    ordering         ordering, shuffle with shuffle_buffer
    batching         batching (stacked, padded, ragged)
    unique           unique
    windows          windows (datasets of windows, buckets) with window_collector
    packing          packing (whole sequences), concat_then_split, with packed_rows; cost_batching
    sliding_windows  sliding_windows with sliding_buffer
    combining        combining; interleave with interleave_order (cycle order, states) and
                     open_datasets, nested_dataset; input_selection (sampling, choices) with
                     input_selector
    buffering        buffering (prefetch), caching with cache_store
    read_splits      split_elements (worker results in the client), boundary_iterators (element
                     ids, partial splits)

Plans whose splits are assigned by a dispatcher:

    split_provider   source of assigned splits
    assigned_iterators  leaves of the plan, and the whole plan
    element_ids, split_progress  splits of elements and errors; element counts of splits
    delivered_elements  sets of delivered elements
    remaining_elements  reads the elements that were not delivered
"""
