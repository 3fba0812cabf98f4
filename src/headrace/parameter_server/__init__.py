"""Parameter servers: variables and tables in other processes, and what changes them."""
