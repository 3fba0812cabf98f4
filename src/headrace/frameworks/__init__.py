"""Compute frameworks, one file each: devices, and what becomes of replicas' values on them.

Nothing here is imported before somebody asks for a framework by its name.
"""
