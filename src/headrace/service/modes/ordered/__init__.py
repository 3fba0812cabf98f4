"""Ordered reading: elements are delivered in the order of the plan.

policy             the dispatcher assigns splits
speculation        splits of a slow task are assigned to an idle one as well
ordered_partition  the worker stage and the client stage of a plan
client_stage       reads the client stage over the arriving elements
reorder_buffer     sorts elements that arrive in any order by split and ordinal
consumer_options   validated options that identify one of several consumers
ordered_consumers  the source of one of several consumers
ordered_readers    its readers: its own elements, or its part of the whole stream
"""
