"""Execution: each plan node's iterator, in the twin of the file that describes the node.

    build            a plan to an iterator: the one way in
    iterator         the contract of all iterators, and the table that finds a node's
    context          what the iterators of one plan share

What steps are made of:

    intake           an input, read in exact amounts
    stage            steps over one input; `RowStage` is a step in five lines
    reread           an input whose elements a step holds, found again after a restore
    places, runs     numbers of places; sets of numbers as bits and as runs
    values           values of the user's in states, as JSON
    pace, waiting    how many to ask for at once; waits that say what they wait for
    feeder, crew     threads: one that reads an iterator, several that run jobs
    watch_point      where statistics, tracing and faults for tests look on

Steps, by the file in `plan/` that describes them:

    elements         elements (numbers, rows), reading (files, generators)
    elementwise      elementwise, column_call (whole columns), parallel with workers (threads),
                     free (an order that is free, without threads)
    ordering         ordering, shuffle with shuffle_order (arithmetic) and shuffle_slots (what is
                     held)
    blocks           blocks
    failures         failures: where an element fails that was made elsewhere
    scanning         scanning
    batching         batching
    padding          padding: a batch but for how its elements are joined
    windows          windows (datasets made of windows, buckets) with gathering (what is held)
    choosing         choosing (samples and choices) with chooser (which input is next)
    combining        combining, interleave with interleave_order (arithmetic), interleave_log
                     (states), open_datasets, outer and inner (what is open), mixing (chunks)
    buffering        buffering (prefetch), caching with cache_store
    dealt            the same plan, where somebody (dealer) deals out its units; root names elements
                     by their origins (origins, counted in a ledger), part reads a unit for some
                     of its elements, rest reads what was not delivered
"""
