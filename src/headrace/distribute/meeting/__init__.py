"""Where several workers meet: each brings something, and all take the same away.

A *meeting* has a number. Every worker comes to every meeting, in the order of the numbers, with a
*contribution*; when all are there it has a *result*, which is the same for all. A worker may be at
several meetings at once: it says what it has, and takes the result when it needs it.

    hall       the pure core: who has come to which meeting, what becomes of it (sums, the first
               one, all of them), who is missing
    messages   what travels: arrays as heads and buffers, errors
    place      the shell: a port in the process of the first worker, with a hall for each session,
               and how that worker reaches it without a socket
    summing    sums of many arrays, and of large ones
    member     a worker's end: asks, waits, repeats, warns, gives up, leaves
"""
