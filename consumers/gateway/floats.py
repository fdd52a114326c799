"""Float32 values as the doubles whose JSON is shortest: 0.7 instead of 0.699999988079071."""

from __future__ import annotations

from typing import Any

import numpy as np

_TENS = 10.0 ** np.arange(23)  # those that a double holds exactly
_LEAST, _MOST = 1e-14, 1e16  # between them every power of ten that is wanted is one of these
_SURE, _ENOUGH = 6, 9  # so many digits always come back from a float32; so many always tell one from the next


def shortest(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the doubles with the fewest decimal digits that round to these float32 values. Any thread."""
    exact = values.astype(np.float64)
    said, size = exact.copy(), np.abs(exact)
    usual = (size >= _LEAST) & (size < _MOST)
    left = np.flatnonzero(usual)
    exponent = np.floor(np.log10(size[left])).astype(np.intp)
    for digits in range(_SURE, _ENOUGH + 1):
        places = digits - 1 - exponent
        up, down = _TENS[np.maximum(places, 0)], _TENS[np.maximum(-places, 0)]
        # a whole number by an exact one: the nearest double
        rounded = np.rint(exact[left] * up / down) / up * down
        fits = rounded.astype(np.float32) == values[left]
        said[left[fits]] = rounded[fits]
        left, exponent = left[~fits], exponent[~fits]
        if not len(left):
            break
    for place in np.flatnonzero(~usual & (size > 0) & np.isfinite(size)):
        said[place] = float(str(values[place]))
    return said
