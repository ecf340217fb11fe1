"""Builds environments in which a real vLLM serves a tiny random model on this CPU."""
