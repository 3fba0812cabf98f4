"""Dynamic sharding (DYNAMIC): splits of one stream go to the workers that ask for them.

policy   the dispatcher assigns splits, at most once or exactly once
shares   which units a task gets next
"""
