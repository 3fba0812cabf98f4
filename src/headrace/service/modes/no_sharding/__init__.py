"""No sharding (ShardingPolicy.OFF): each worker reads the whole dataset.

policy   creates a task for each worker
"""
