"""``model.sig``: whether a signature of OpenSSF model signing matches the files that it covers.

The file is a Sigstore bundle around an in-toto statement, which lists files and their digests
(https://github.com/sigstore/model-transparency, ``_signing/signing.py``, ``Payload``). The package model-signing
computes the digests. Who has signed is not checked: that needs a key or an identity, and ``model_signing verify``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.text import counted, error_text, some
from xhf_hooks.integrity.check import NOTE, OK, PROBLEM, UNCHECKED, FolderCheck

SIGNATURE_NAME = 'model.sig'
_CHECK = 'signature'


def check_signatures(check: FolderCheck, *, read: bool) -> None:
    """Check the signatures in the folder, and in the folder of results that ``on_saved`` has for this save.

    Args:
        read: Read the files that a signature covers.
    """
    places = {SIGNATURE_NAME: check.path / SIGNATURE_NAME}
    if check.manifest is not None:
        results = f'{check.manifest.commit.name}_on_saved', check.manifest.step.label
        if all(Path(part).name == part for part in results):  # anybody may have written the manifest
            places['/'.join(('..', *results, SIGNATURE_NAME))] = check.path.absolute().parent.joinpath(
                *results, SIGNATURE_NAME
            )
    for shown, path in places.items():
        if path.is_file():
            kind, text = _compare_files(check, path) if read else (UNCHECKED, 'nothing was read (--no-read)')
            check.add(kind, _CHECK, f'{shown}: {text}')


def _compare_files(check: FolderCheck, signature: Path) -> tuple[str, str]:
    """Compare the files with a signature; returns the kind of the finding, and its text."""
    try:
        from model_signing import hashing
    except ImportError as error:
        return UNCHECKED, f'not compared: {error} (pip install model-signing)'
    try:
        serialization, digests = _read_statement(signature)
        size = {'shard_size': int(serialization['shard_size'])} if serialization['method'] == 'shards' else {}
        hashing_config = hashing.Config()
        choose_serialization = hashing_config.use_shard_serialization if size else hashing_config.use_file_serialization
        choose_serialization(hashing_algorithm=serialization['hash_type'], **size)
        hashing_config.set_allow_symlinks(True)  # the hub cache consists of links
        # A shard is named FILE:START:END
        covered = {name.rsplit(':', 2)[0] if size else name for name in digests}
        there = sorted(covered & check.files.keys())
        hashed = hashing_config.hash(check.path, files_to_hash=[check.path / name for name in there])
        found = {each.identifier: each.digest.digest_hex for each in hashed.resource_descriptors()}
    except Exception as error:  # of the package, which says what it does not know; or a file of another kind
        return (
            UNCHECKED,
            f'not compared, since it could not be read as a signature of model-signing: {error_text(error)}',
        )
    changed = sorted({name for name in digests.keys() | found.keys() if digests.get(name) != found.get(name)})
    if changed:
        return PROBLEM, f'does not match the files that it covers: {some(changed)}'
    left_out = sorted(check.files.keys() - covered - {SIGNATURE_NAME})
    text = f'matches the {counted(len(covered), "file")} that it covers'
    text += f', but not {some(left_out)}' if left_out else ''
    return (NOTE if left_out else OK), f'{text}; who signed it was not checked (model_signing verify does that)'


def _read_statement(signature: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """How digests were made of the files, and each digest by the name of the file or shard.

    Raises:
        DamagedError, ValueError, KeyError, TypeError: It is no signature of model-signing.
    """
    bundle = strict_json.read(signature)
    statement = strict_json.parse(base64.b64decode(bundle['dsseEnvelope']['payload']), str(signature))
    predicate = statement['predicate']
    digests = {str(resource['name']): resource['digest'] for resource in predicate['resources']}
    if not digests:
        raise DamagedError(f'{signature}: it names no files')
    return predicate['serialization'], digests
