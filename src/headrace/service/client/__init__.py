"""The client: reads the tasks of an iteration and is a Source again.

    schedule    numbers, credit and order: what may be asked for, what came twice (pure)
    task_reader one task: a thread with a channel to its worker
    reader      all tasks of an iteration, in one queue
    source      the Source that a plan holds

Nothing above the source knows that its elements come from elsewhere.
"""
