"""The model that is trained: forward pass, attention, adapters, sharding, optimizer."""
