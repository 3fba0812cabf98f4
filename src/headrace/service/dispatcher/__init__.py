"""The dispatcher: it knows datasets, workers, jobs and tasks, and never receives an element.

State, as the result of journaled events:

    event          base class of events
    events         events, in the past tense
    mode_state     base classes of what a reading mode adds to the state
    state          the result of all events, with its invariants
    apply          the only code that changes a state
    apply_splits   events about splits: assigned, returned, missing
    apply_reports  events about what clients received of a task
    invalid_event  errors about events that contradict the state
    invariants     checks of a state, for tests

How workers share an iteration:

    assignment     assignment of tasks to workers, and other derived events, in all modes
    policy_selection  the policy of a processing mode (policies are in `service.modes`)
    unsupported_modes  iterations of other versions in unsupported modes
    policy         interface of policies
    python_versions  which workers can run the functions of which datasets

In-memory state of one process:

    limits         timeouts, intervals and sizes
    rate_history   rates in the most recent intervals
    worker_connections  connections of workers, which show whether their processes run
    activity       activity of tasks, as reported in heartbeats
    soft_state     times of heartbeats, and what else is not journaled
    checkpoint_contributions  iterator positions contributed by clients
    reachability   clients that cannot reach tasks
    idle_times     times of last use
    worker_scaling  policy of autoscaling: the number of workers for a load
    worker_demand  latest result of that policy

Deciders, which only read the state:

    decision       inputs and results of deciders
    slots          the fixed list of workers
    registration   register datasets and workers
    plans          receive and send plans in parts
    jobs           create jobs and their iterations
    start_positions  start positions of iterations
    checkpoint_barrier  common iterator position of an iteration's clients
    clients        heartbeats, delivery reports and departure of clients
    departed_clients  recover elements that were sent to departed clients
    task_addresses  lists of tasks and their changes, as clients receive them
    tasks          definition and end of tasks
    splits         assign splits and take them back
    liveness       heartbeats, draining, departure and loss of workers
    garbage_collection  remove what is no longer needed
    status         status of the service
    service_load   load of the service, for the scaling policy
    losses         what a finished iteration has lost

Runtime:

    dispatcher     state machine: a table from requests to deciders, and one state
    event_report   reports of what happened to a task or a job
    core           the state machine with journal and clock
    authorization  authorization of requests by key
    metrics        Prometheus metrics
    server         port and threads
"""
