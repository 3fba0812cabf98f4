"""Cross-trainer cache: several trainers share the elements that workers produce.

policy         sharding policies of shared jobs at the dispatcher
shared_window  delivery policy: a sliding window of batches that all trainers read
lag            counts elements that a trainer missed
"""
