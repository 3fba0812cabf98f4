"""Dynamic sharding (DYNAMIC): splits of one stream go to the workers that request them.

policy   assigns splits, at most once or exactly once, and chooses their number
"""
