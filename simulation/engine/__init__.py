"""A simulated inference engine that speaks vLLM's token-in/token-out protocol."""
