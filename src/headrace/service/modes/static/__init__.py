"""Static sharding (FILE, DATA, FILE_OR_DATA, HINT): each worker of a list reads its own shard.

policy   creates a task for the shard of each slot of the list
records  the shard of a task, in the dispatcher's state
"""
