"""Distributed save: workers write the elements of a dataset to files.

policy     the dispatcher assigns splits, as in dynamic sharding
requests   saves begin and end, and their files count
records    what the dispatcher remembers of saves
apply      changes of the dispatcher's state
publisher  updates the directory
delivery   the worker reports files in place of elements
producer   the worker's thread that writes files
"""
