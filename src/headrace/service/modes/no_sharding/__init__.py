"""No sharding (ShardingPolicy.OFF): each worker reads the whole dataset.

policy   the dispatcher gives each worker a task
"""
