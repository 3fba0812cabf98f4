"""The worker: runs tasks and hands their elements to clients, first come, first served.

    units         what an iterator's state says about units (pure)
    first_come    which request gets which portion, and when a task is over (pure)
    unit_feed     a task's units, asked for in ranges of a fitting length
    plans         plans by digest, fetched once
    opening       the one place where the engine is called
    failure       what went wrong, in words for clients
    portion       what answers one request
    producer      a thread that cuts an iterator's elements into portions
    task          one task: a policy under a lock, a producer, a feed
    connections   connections to the dispatcher, lent to threads
    task_set      all tasks of a worker: started when first asked for, kept, finished, deleted
    server        the shell: two addresses, a heartbeat, the task set

Elements leave by the path of a request; nothing is sent to a client that did not ask.
"""
