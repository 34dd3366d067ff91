"""Prompts, the mixture that draws them, and the verifiers that judge their answers."""
