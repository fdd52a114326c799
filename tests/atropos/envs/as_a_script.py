"""Prints what a script can see of how it was started."""

import __main__
import sys

print(__name__, __file__, sys.argv, sys.path[0], __main__.__dict__ is globals())
