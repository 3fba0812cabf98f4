"""Child processes: started with a clean environment, kept running, stopped by a deadline.

parent_link  the child's side: what it says to whoever started it, how it learns that it is to
             leave,
        what ends it when it hangs
child   one process, the link to it, how it ended
supervisor  commands that are kept running: started again, after a growing delay, when they die; the
        thread that looks at them, and how they are stopped

A child dies with its parent: a socket ties the two, and it closes however the parent ends. Whether
an end was asked for is never read from an exit code, which a user's function may have chosen: the
parent remembers whom it asked, and a child that a signal asks says so.
"""
