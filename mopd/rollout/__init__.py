"""Sampling the student with vLLM."""
