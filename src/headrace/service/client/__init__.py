"""Client: reads the tasks of an iteration and presents them as a Source.

Pure logic on plain values, without threads, sockets or clocks:

    iteration_session   base of the sessions: one iteration, read from all of its tasks
    read_session        delivers elements in arrival order, from whichever task they come
    task_reader         one task: its requests, its replies, and whether its worker responds
    delivery_record     the splits of a task that were received completely or in part
    loss_reporter       reports to the dispatcher about lost tasks and consumed elements
    request_scheduler   the number of requests in flight, and the order of tasks
    heartbeat_schedule  when to call the dispatcher
    compression_tuner   measures whether compressed replies are faster
    actions             what the runner must do
    saved_positions     where reading resumes from a saved state, and what remains to read
    delivery_progress   which elements were delivered up to each position, without order
    data_loss           the error or warning at the end of an epoch that lost elements
    exhausted_jobs      distinguishes a job that was read before from a late reader
    worker_errors       the error of an element, with the worker that raised it

Input and output:

    options            reading options, validated once
    visitation         the delivery guarantees that a plan supports, and the default
    source             the Source that a plan holds
    process_source     the Source of `Dataset.in_processes`
    reader             the consumer's iterator, which returns chunks of the requested size
    replay             elements that may be requested again, until they are no longer needed
    task_list           running tasks, updated with the dispatcher's changes
    task_selector       selects this client's tasks by worker location and tags
    iteration_opening  the first call to the dispatcher
    reader_runner      the session with its lock and I/O thread

No module above the source knows that its elements come from a service.
"""
