"""Plans: what is to be done with elements, as values; nothing here reads, runs or waits."""
