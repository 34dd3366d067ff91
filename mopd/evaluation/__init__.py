"""Scoring base, teachers and student on held-out prompts; retention; the report."""
