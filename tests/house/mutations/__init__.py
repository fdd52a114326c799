"""Does a test go red when a guarantee is broken? Planted errors, and the tests that must find them."""
