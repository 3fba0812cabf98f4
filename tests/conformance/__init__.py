"""Conformance of every source and every transformation, from tables with an entry for each."""
