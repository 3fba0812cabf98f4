"""The client: reads the tasks of an iteration, and is a Source again.

What is decided, on plain values, without thread, socket or clock:

    reading    one iteration, read from all of its tasks: what its sessions have in common
    session    what is there is delivered, whichever task it comes from
    task       one task: what was asked, what arrived, whether its worker answers
    receipt    which units of a task came whole, and of which anything came
    settling   what the dispatcher is to hear of lost tasks, and of what was used
    schedule   how many requests may be under way, and who is first in line
    contact    when the dispatcher is asked
    packing_pace    whether answers are to be packed, found out by trying
    actions    what the shell is to do
    places     from which unit on a saved place is read, and what is left of it
    progress   what was given up to each place, where there is no order
    losses     what is said at the end of a pass that lost something
    job_use    whether a job was read before, or this reader only comes late
    failure    an element's error, with the worker that it came from

What does it:

    options    how a service is read, checked once
    visits     how often elements are visited: what a plan can do, and its default
    source     the Source that a plan holds
    reader     what the consumer takes from an iteration, in pieces of the size that is asked for
    keeping    what was given, until it cannot be asked for again
    targets    which tasks are for this client, by where their workers are, and by tags
    opening    the first call to the dispatcher
    shell      the session under a lock, and the I/O thread

Nothing above the source knows that its elements come from elsewhere.
"""
