"""The compiled core: shared words, waiting, packing. Knows nothing of schemas, processes' roles or names."""

from importlib.util import find_spec

if find_spec("shmbridge._ext.header") is None:
    raise ImportError(
        f"the extensions are not built in {__path__[0]} -> in the clone: pip install -e . (in a clone's"
        " folder Python finds the clone before the shmbridge that is installed)"
    )
