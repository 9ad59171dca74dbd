"""Cases of one test, in two tiers."""

from collections.abc import Sequence
from typing import Any

import pytest


def split_tiers(cases: Sequence[Any], nth: int) -> list[Any]:
    """Parameters of a test with many alike cases: of ``nth`` in a row, one is in the first tier.

    Args:
        cases: Values of one argument, or tuples of several.
    """

    def in_second(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=pytest.mark.needs())

    return [in_second(case) if number % nth else case for number, case in enumerate(cases)]
