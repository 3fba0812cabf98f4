"""The dispatcher: it knows datasets, workers, jobs and tasks, and never sees an element.

What it remembers, as facts that add up to a state:

    event          the base class of facts
    events         facts, in the past tense
    mode_state     base classes of what a reading mode adds to the state
    state          what they add up to, with its invariants
    apply          the only code that changes a state
    apply_splits   its part about units: dealt, returned, missing
    apply_reports  its part about what clients have of a task
    invalid_event  a fact that does not fit, with the story of what it names
    invariants     checks a state, for tests

How workers share an iteration:

    assignment     who gets which task, and what follows from facts, whatever the mode
    policy_selection  which policy a processing mode has (the policies are in `service.modes`)
    unsupported_modes  what another version began, and this one does not offer
    policy         what there is to say of a mode
    python_versions  which workers can run the functions of which datasets

What one run of the process knows beside that:

    limits         how long what is waited for
    rate_history   how much of something there was in each of the last intervals
    worker_connections  whether the processes of workers run, by their connections
    activity       what is done for tasks, as heartbeats say
    soft_state     who was heard from when, and what else is not journaled
    checkpoint_contributions  what clients said of where they stand
    reachability   which clients cannot reach which tasks, and since when
    idle_times     when what is idle was last used

Who decides; each reads, and never writes:

    decision       what a decider is given, and what it gives back
    slots          which worker takes which slot of a fixed list
    registration   datasets and workers become known
    plans          plans arrive and leave, in parts
    jobs           jobs and their iterations begin
    start_positions  at which place an iteration begins
    checkpoint_barrier  at which place the clients of an iteration stand together
    clients        clients read, settle what was lost, and leave
    departed_clients  what becomes of elements that were sent to clients which are gone
    tasks          what a task is about, and how it ends
    splits         tasks ask for units, and hand them back
    liveness       who is alive, who leaves, who is gone
    garbage_collection  what is forgotten, so that it stays small
    status         who is there, and what is going on
    losses         what an iteration has lost in the end

What runs it:

    dispatcher     request -> decider, as a table, round one state
    event_report   what became of a task or a job, in plain sentences
    core           what `serving.core` runs
    authorization  who may ask what
    metrics        what Prometheus is told
    server         the shell: port and threads
"""
