"""Static sharding (FILE, DATA, FILE_OR_DATA, HINT): each worker of a list reads its own share.

policy   the dispatcher gives each slot of the list a task for its share
records  the shard of a task, in the dispatcher's state
"""
