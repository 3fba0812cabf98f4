"""How fast is it, beside what people use today and beside what the machine can do?

One file a question; each lists its contenders: Headrace, the peers, and the physical limits.

    python -m benchmarks                   all questions, one table; writes RESULTS.md, results.json
    python -m benchmarks small_rows jpeg   only these
    python -m benchmarks --quick           short rounds, to see that all runs; writes nothing
    python -m benchmarks --list            the questions and their contenders

    workload      the records: Workload, Contender, Target
    measure       rounds in turn, one process a contender; medians and ratios
    contender     what runs inside such a process
    cpu_time      what a contender and the processes that it started have used
    inputs        synthetic files, from a seed
    report        the machine, the table, RESULTS.md
"""
