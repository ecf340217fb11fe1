"""The orchestrator under load: a client with many rollouts in flight, and a feed beside it."""
