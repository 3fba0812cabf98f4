"""Data worker: runs tasks and sends their elements to clients.

Pure logic on plain values, without threads, sockets or clocks:

    core              registration with the dispatcher, requests to it, draining
    registration      worker id, heartbeats and their intervals
    draining          phases of draining, and what was not delivered
    task_table        all tasks, from the first request for a task to its end
    plan_lookups      plans by digest, each fetched once, in parts
    task              one task: its requests, result batches, splits and reports
    registry          delivery policies and producers by the names in task definitions
    delivery_policy   interface of the delivery policies
    fifo_delivery     sends each result batch to the request that has waited longest
    split_requests    when to request splits, and how many
    assignment_order  maps element ids from splits of the stream to assignment order
    pending_actions   actions to execute now, and when to check again

Input and output:

    server              the listening server and its lifecycle
    local_workers       workers of this process by id
    runner              the core with its lock, I/O thread and producers
    task_thread         a thread that reads the iterator of a task
    producer            a task thread that groups elements into result batches
    preloading          imports modules before the first task
    split_ends          decides when the ends of splits are reported
    producer_channel    lets a producer wait for room and for splits
    task_metrics        work done for each task, for heartbeats and metrics
    processor_use       cores and processor time of the process
    prometheus_metrics  metrics for Prometheus
    step_profiler       time spent in each step of the datasets
    hang_detector       tasks that make no progress
    task_iterator       the only module that calls the engine
    result_batch        the result of one request
    replies             puts a result batch into a reply
    batch_frames        the frames of a result batch that are sent
    reply_compressor    compresses replies on its own threads, for slow networks
    client_errors       errors of tasks, as reported to clients

Elements are sent only as replies to requests; a client that does not request elements receives
none.
"""
