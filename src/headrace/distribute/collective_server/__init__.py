"""Collective operations of the workers of one session: each contributes, and all get one result.

A *collective* has a number. Every worker contributes to every collective, in the order of the
numbers; when all have contributed it has a *result*, the same for all. A worker may have several
collectives in flight: it contributes first, and waits for the result when it needs it.

    state         the pure core: contributions to collectives, their combination (sums, the first
                  one, all of them), missing workers
    messages      messages, with arrays as headers and buffers, and errors
    server        a port in the process of the first worker, with a `CollectiveState` for each
                  session, and that worker's channel without a socket
    chunked_sums  sums of many or large arrays
    client        a worker's client: contributions, retries, warnings, timeouts
"""
