"""Adapters: datasets as PyTorch, JAX and Keras read them, and tables as they look them up."""
