"""Execution: each plan node's iterator.

    build            a plan to an iterator: the one way in; whether a step opens files
    iterator         the contract of all iterators, the table that finds a node's, the watch point
                     where statistics, tracing and faults for tests look on
    context          what the iterators of one plan share; the iteration that shared jobs know it by

What steps are made of:

    intake           an input, read in exact amounts; how many elements to ask for at once
    stage            steps over one input; `RowStage` is a step in five lines
    reread           an input whose elements a step holds, found again after a restore
    places           numbers of places; parts of several chunks mixed into one
    threads          one that reads an iterator, several that run jobs, waits that say for what

Steps, by the file in `plan/` that describes them:

    elements         elements (numbers, rows), reading (files, generators)
    elementwise      elementwise with whole columns, scanning, parallel with workers (threads)
    ordering         ordering, shuffle with shuffle_buffer (what is drawn, what is held)
    batching         batching, padded or not
    windows          windows (datasets made of windows, buckets) with gathering (what is held)
    combining        combining; interleave with interleave_order (turns and states), open_datasets
                     and inner (what is open); choosing (samples and choices) with chooser (which
                     input is next)
    buffering        buffering (prefetch), caching with cache_store
    units            units with unit_elements (what workers made, at the client), root (names
                     elements by their origins, and reads units in part)

A plan whose units somebody deals out:

    dealer           who deals
    dealt            the plan's leaves, and the whole of it
    origins, ledger  which units elements and errors are of, and how many elements units had
    delivered        sets of what was delivered
    rest             reads what was not
"""
