"""vLLM takes its weights from a bridge: both halves of vLLM's weight transfer, and what stands before its
server.
"""
