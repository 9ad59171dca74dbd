"""Answers of the system to calls that write, and what is written."""

import ctypes
import random
from functools import cache

MB = 2**20


def answer(number):
    """What stands for the call and fails."""

    def fail(*args):
        ctypes.set_errno(number)
        return -1

    return fail


@cache
def random_bytes(nbytes: int) -> bytes:
    return random.Random(0).randbytes(nbytes)
