"""Ray: the one engine that places and supervises every process of a run."""
