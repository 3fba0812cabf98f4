"""The service in virtual time: real cores and sessions, a simulated world, a seed.

    world.py        time, chance, processes that pause and die, the story so far
    network.py      connections: in order, delayed, broken
    dispatcher.py   the dispatcher's core and journal as a process
    worker.py       a worker's session as a process
    client.py       a client's session and its consumer as a process
    production.py   stand-ins for the engine: units in, portions out
    scenario.py     what a seed stands for: who is there, what is read, what goes wrong
    storm.py        what goes wrong
    promises.py     what must hold all the same
    round_promises.py  what must hold of rounds
    run.py          one seed, from the first event to the last check

A role is a `Process` that connects to others and answers requests; to add one, add a file.
"""
