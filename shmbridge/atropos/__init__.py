"""What the transport knows of the arithmetic of the Atropos API server."""
