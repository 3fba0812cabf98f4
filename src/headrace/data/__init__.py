"""Datasets: a plan with methods, and the iterator that its user sees."""
