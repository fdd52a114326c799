"""The parts of the embedded policy server; `policy_server.py` next door is the program that joins them."""
