"""Cross-trainer cache: trainers share what the workers produce.

policy          the dispatcher's policies of other modes, shared by trainers
delivery        the worker gives every portion to every trainer
window          the newest portions, and where trainers are in them
falling_behind  counts elements that a trainer missed
"""
