"""The worker: runs tasks and hands their elements to clients.

What is decided, on plain values, without thread, socket or clock:

    session       who the worker is to the dispatcher, what it asks, how it leaves
    registration  under which id, with which heartbeats
    leaving       how far it is with leaving, and what it has not delivered
    task_table    all its tasks, from the first request for one to its end
    plans         plans by digest, fetched once, in parts
    task          one task: its requests and portions, its units, its report
    ways          what a task's definition says by name: how units and elements are handed out
    hand_out      what every way to hand out elements does
    first_come    the next portion to who has waited longest
    unit_asking   how many units are asked for, and when
    dealt_order   whence elements are, by units in dealt order
    agenda        what is to be done now, and when to look again

What does it:

    server        where the worker listens, and its life
    here          which workers are of this process, by their ids
    shell         the session under a lock, the I/O thread, the producers
    task_thread   a thread that reads the iterator of a task
    producer      one that cuts its elements into portions
    preloading    modules that are imported before the first task
    unit_ends     when it is said of units that they ended
    feed          where a producer waits for room and for units
    meters        what is done for each task, for heartbeats and metrics
    gauges        what Prometheus is told
    sampler       at which steps of datasets the time goes
    hang_detector tasks that make no progress
    opening       the one place where the engine is called
    portion       what answers one request
    answering     how that is put into the answer
    sending       what of a portion is sent
    packer        packs it for a slow wire, on threads of its own
    failure       what went wrong, in words for clients

Elements leave by the path of a request; nothing is sent to a client that did not ask.
"""
