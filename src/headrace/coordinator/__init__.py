"""The coordinator: closures that are scheduled here, run on workers, and survive their loss."""
