"""Ordered reading: elements are delivered in the order of the plan.

policy             the dispatcher assigns splits
backups            a split that a slow task holds is given to an idle one as well
plan_cut           which steps of the plan run at the workers, and which at the client
reader             the client's steps, over what arrives
units              what arrives in any order, sorted by unit and ordinal
consumers          which of several consumers reads: arguments, checked once
consumers_source   the source of one of several consumers
consumers_readers  its readers: its own elements, or its part of the whole stream
"""
