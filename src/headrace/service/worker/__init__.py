"""The worker: runs tasks and hands their elements to clients, first come, first served.

    delivery      which frame each client got under which number (pure)
    split_feed    a task's splits, asked for in ranges of a fitting length
    task_runner   one task: a thread that produces frames, and the requests that wait for them
    task_set      all tasks of a worker: started when first asked for, kept, finished, deleted
    server        the shell: two addresses, a heartbeat, the task set

Elements leave by the path of a request; nothing is sent to a client that did not ask.
"""
