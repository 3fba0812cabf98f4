"""Execution: each plan node's iterator, in the twin of the file that describes the node."""
