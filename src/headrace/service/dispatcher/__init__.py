"""The dispatcher: it knows datasets, workers, jobs and tasks, and never sees an element.

================================================  =============================================
`updates`                                         facts, in the past tense
`state` `ranges`                                  what the facts add up to
`apply`                                           the only code that changes a state
`limits` `presence` `decision`                    what a decider is given, what it gives back
`registration` `plans` `jobs` `clients` `tasks`   deciders: they read, and never write
`splits` `liveness` `status`
`assignment`                                      who gets which task, and what follows from facts
`dispatcher`                                      request -> decider, as a table, round one state
`journal`                                         what `serving.journal` keeps for it
`core`                                            what `serving.core` runs
`server`                                          the shell: port and threads
`stub`                                            typed calls to that server
================================================  =============================================
"""
