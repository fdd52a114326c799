"""The worked example of docs/reference/advantages.md runs, and its lines give the results written beside
them.
"""

import re
from pathlib import Path

import numpy as np

PAGE = Path(__file__).parents[3] / "docs/reference/advantages.md"


def test_the_example_makes_what_it_says() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    said = 0
    for line in block.splitlines():
        code, _, numbers = line.partition("#")
        exec(code, scope)
        if numbers:
            made = eval(code.split(" = ")[-1], scope)
            np.testing.assert_allclose(made, eval(numbers.replace("|", ",")), err_msg=line)
            said += 1
    assert said == 5
