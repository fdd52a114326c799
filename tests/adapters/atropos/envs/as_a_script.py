"""Prints what a script can see of how it was started."""

import sys

import __main__

print(__name__, __file__, sys.argv, sys.path[0], __main__.__dict__ is globals())
