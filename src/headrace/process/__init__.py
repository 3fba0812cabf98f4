"""Child processes: clean environments, supervision with restarts, and stops with a deadline.

    parent_link  the child's side: messages to the parent, stop requests, exit of hung processes
    child        the parent's side: one process, its link, and how it ended
    program      a program of the user, which shares this process's standard streams
    supervisor   supervised commands: polling, restarts with exponential backoff, stop

A child ends with its parent: a socket connects the two, and the kernel closes it however the parent
ends. An exit code never shows whether an exit was requested, since a user's function may have
chosen the code. The parent records which processes it asked to stop, and a child reports a signal
to the parent.
"""
