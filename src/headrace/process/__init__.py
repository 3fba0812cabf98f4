"""Child processes: started with a clean environment, kept running, stopped by a deadline.

parent     what a child says to whoever started it, and how it learns that it is to leave
child      one process, the link to it, how it ended
family     commands that are kept running: started again, after a growing delay, when they die
stopping   children asked to leave, waited for, and killed when they do not
bound      commands of children that are of no use without their parent
household  a family of these, and the thread that looks at it
watchdog   ends a child that hangs
large_copies  from which size on copies of a child write past the caches

A child dies with its parent: a socket ties the two, and it closes however the parent ends. Whether
an end was asked for is never read from an exit code, which a user's function may have chosen: the
parent remembers whom it asked, and a child that a signal asks says so.
"""
