"""Rewrites: rules of a few lines that turn a plan into one with the same elements, sooner."""
