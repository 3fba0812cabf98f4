"""Plans: immutable descriptions of dataset steps. Nothing in this package reads, runs or waits."""
