"""How fast is it, beside what people use today and beside what the machine can do?

One file a question; each lists its contenders: Headrace, the peers, and the physical limits.

    python -m benchmarks                   all questions, one table; writes RESULTS.md, results.json
    python -m benchmarks small_rows jpeg   only these
    python -m benchmarks --quick           short rounds, to see that all runs; writes nothing
    python -m benchmarks --list            the questions and their contenders
    python -m benchmarks.dispatcher_curves the dispatcher with 1 to 1,000 peers of each kind

    workload      the records: Workload, Contender, Target, Bound
    measure       rounds in turn, one process a contender; medians and ratios
    contender     what runs inside such a process
    cpu_time      what a contender and the processes that it started have used
    inputs        synthetic files, from a seed
    local_service  a service of worker processes on this host; dispatcher_process, tfdata_server
    simulated_peers  a thousand peers of a dispatcher in one thread, those that ask for splits by
                  raw_connection; held_requests: without sockets
    report        the machine, the table, RESULTS.md
"""
