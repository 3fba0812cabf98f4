"""The dispatcher: it knows datasets, workers, jobs and tasks, and never sees an element.

=========================================  ====================================================
`updates`                                  facts, in the past tense
`state`                                    what the facts add up to; only here anything changes
`decision`                                 what a decider is given, and what it gives back
`registration` `jobs` `splits` `liveness`  deciders: they read, and never write
`dispatcher`                               request -> decider, as a table, around one state
`journal`                                  keeps facts, in order, across a crash
`server`                                   the shell: lock, clock, wire
`stub`                                     typed calls to that server
=========================================  ====================================================
"""
