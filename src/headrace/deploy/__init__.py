"""Tasks of a training cluster as processes: a server of any role, and a whole cluster here."""
