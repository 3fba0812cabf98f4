"""Benchmarks of Headrace against other libraries and against the limits of the machine.

One module per benchmark; each lists its contenders: Headrace, its peers, and upper limits.

    python -m benchmarks                   all benchmarks, 40 minutes; writes results.json and
                                           the report
    python -m benchmarks service jpeg      only these areas and benchmarks
    python -m benchmarks --quick           three workloads per area, short rounds, 8 minutes;
                                           writes nothing
    python -m benchmarks --list            areas, benchmarks, workloads and contenders
    python -m benchmarks.report            writes the report again from results.json
    python -m benchmarks what_if           predictions of `headrace doctor --job`; writes nothing
    python -m benchmarks.accelerator       samples lost while workers are killed; or, with
                                           `--device cuda`, a real accelerator
    python -m benchmarks.dispatcher_curves the dispatcher with 1 to 1,000 peers of each kind
    python -m benchmarks.autoscaling       waits and costs of autoscaling policies, simulated
    python -m benchmarks.dispatcher_scale  the same with 100 to 10,000, in virtual time

    plan                    what to measure, in which order, and how long it takes
    progress                the live line on a terminal, and the lines of results
    workload                the records: Workload, Contender, Target, Bound
    measure                 rounds in turn, one process per contender; medians and ratios
    contender               the program of a contender's process
    cpu_time                processor time of a process and its descendants
    inputs                  synthetic files, generated from a seed
    local_service           a service of worker processes on this host
    dispatcher_process      a dispatcher, or a worker, in its own process
    tfdata_server           a tf.data service in its own processes
    tf_cluster              workers and parameter servers of tf.distribute
    simulated_peers         a thousand clients and workers of a dispatcher, in one thread
    autoscaling_simulation  discrete-event simulation of a service that a policy scales
    autoscaling_loads       its loads: step, ramp, diurnal, flash crowd and others
    autoscaling_optimum     lower bound of the cost of a load
    raw_connection          a connection to a server without ZeroMQ and without a thread
    in_process_requests     requests to a dispatcher's core, without sockets
    accelerator_inputs      files, samples and step durations of the accelerator benchmarks
    accelerator_peers       their contenders with a simulated accelerator
    accelerator_loop        the simulated accelerator, and kills of workers
    accelerator_device      training loops on a real accelerator
    accelerator_models      their training steps in PyTorch and JAX
    areas                   the areas: sections of RESULTS.md and their benchmarks
    results                 the record of a result, the machine, results.json
    targets                 targets of development, printed by the command line
    comparisons             ratios of Headrace to other contenders
    titles                  titles of workloads and contenders, for readers
    formats                 numbers with units
    charts                  charts as SVG text
    report                  RESULTS.md, DETAILS.md and charts/, written from results.json
"""
