"""Coordinated reads: consumers read rounds together, an element each.

policy        the dispatcher assigns tasks, and knows the consumers
records       what the dispatcher remembers of consumers and rounds
apply         changes of the dispatcher's state
delivery      the worker gives an element of each round to each consumer, or to none
round_shape   the rows of a round's batches, shared among consumers
balance       rows shared so that each consumer has as many, at a similar cost
session       the client reads one round after another
session_task  its view of one task
turns         the task of each round
"""
