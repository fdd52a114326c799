"""vLLM integration: both halves of a weight-transfer backend, and the middleware for vLLM's server."""
