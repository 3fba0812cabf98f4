"""Tests of the parameter servers."""
