"""The `headrace` command: one file for each thing that it does; `main` puts them together."""
