"""Child processes: start with a clean environment, supervision, and stop with a deadline.

    parent_link  the child's side: messages to the parent, stop requests, exit of hung processes
    child        one process, its link, and how it ended
    supervisor   commands that are kept running: polling, restarts with growing delays, stop

A child dies with its parent: a socket connects the two, and it closes however the parent ends.
Whether an exit was requested is never derived from an exit code, which a user's function may have
chosen: the parent remembers which processes it asked to stop, and a child that gets a signal
reports that.
"""
