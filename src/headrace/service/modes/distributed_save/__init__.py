"""Distributed save: workers write the elements of a dataset to files.

policy     assigns splits, as dynamic sharding does
requests   deciders: saves start and end, and their files are committed
records    state of saves in the dispatcher, and their events
apply      functions that apply those events
publisher  updates the directory
delivery   reports files to the dispatcher in place of elements to clients
producer   the worker's thread that writes files
"""
