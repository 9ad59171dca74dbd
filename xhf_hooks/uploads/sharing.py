"""Decides which rank uploads which files."""

from __future__ import annotations

from collections.abc import Mapping


def share_out(files: Mapping[str, int], n_ranks: int) -> list[list[str]]:
    """The names of the files that each rank uploads, balanced by size. The same on every rank.

    Args:
        files: Name to size in bytes.
    """
    shares: list[list[str]] = [[] for _ in range(n_ranks)]
    nbytes = [0] * n_ranks
    for name in sorted(files, key=lambda name: (-files[name], name)):
        rank = min(range(n_ranks), key=lambda rank: (nbytes[rank], len(shares[rank]), rank))
        shares[rank].append(name)
        nbytes[rank] += files[name]
    return shares
