"""What a run shows and records: live display, metrics, transcripts, versions."""
