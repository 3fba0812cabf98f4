"""Coordinated reads: consumers read rounds together, one element each.

policy               the dispatcher assigns tasks and tracks consumers
events               journaled state of consumers and rounds, and its events
apply                application of the events to the state
round_delivery       the worker delivers each round to all consumers or to none
round_shaping        shares the rows of a round's batches among consumers
balance              shares rows so that each consumer has the same number at a similar cost
coordinated_session  the client reads one round after another
round_task_reader    the client's view of one task
round_order          determines the task of each round
"""
