"""Clusters of Ray actors.

* `nodes`: import of Ray, addresses of nodes, names of actors, keys.
"""
