"""Rewrites: functions that turn a plan into an equivalent one, or derive facts from it.

canonicalize     the canonical form of a plan as written
optimize         the canonical form, prepared for execution; with columns (functions that can
                 be applied to whole columns)
window_batches   windows of which a function makes one batch each
split_space      splits of a plan: their number, and their positions in its leaves
partition        worker stage and client stage; with partition_boundaries, split_ranges and
                 shuffle_memory
shard            static shards of a plan (FILE, DATA, HINT)
process_pools    the steps before `in_processes`, for rewrites that shard them
reader_agreement  whether all readers get the same elements
explain          plans as text
"""
