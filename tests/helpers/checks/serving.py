"""A stand-in for SGLang's server: it loads a folder when told to, and answers as SGLang does."""

import json
import time
from pathlib import Path
from typing import Any

from tests.helpers.checks.answering import JsonHandler, LocalServer
from tests.helpers.checks.assert_intact import MANIFEST, assert_whole
from tests.helpers.checks.compare import folder_tensors
from tests.helpers.ranks.launch import HANG_SECS


class Server(LocalServer):
    """Loads what ``POST /update_weights_from_disk`` names, checks it, and serves until the next one.

    While it loads it waits, unless it loads the last save, until a newer one has replaced ``newest``: it then reads the
    folder again.

    Args:
        newest: The folder that every save replaces.
        last: The iteration of the last save.

    Attributes:
        loaded: The iterations of the saves that were loaded.
        tensors: Those of the model that is served.
        wrong: What was wrong with a request; must stay empty.
    """

    def __init__(self, newest: Path, last: int) -> None:
        super().__init__(_Handler)
        self.newest, self.last = newest, last
        self.loaded: list[int] = []
        self.wrong: list[str] = []
        self.tensors: dict[str, Any] = {}

    def load(self, folder: Path) -> None:
        """Load and serve a folder; raises if it is not whole, or changes."""
        from transformers import AutoModelForCausalLM

        iteration = assert_whole(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        before = folder_tensors(folder)
        deadline = time.monotonic() + HANG_SECS
        while iteration != self.last and _iteration(self.newest) <= iteration:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert assert_whole(folder) == iteration
        after, state = folder_tensors(folder), model.state_dict()
        assert before.keys() == after.keys()
        assert all(before[name].equal(after[name]) and before[name].equal(state[name]) for name in before)
        self.tensors = before
        self.loaded.append(iteration)


def _iteration(folder: Path) -> int:
    return json.loads((folder / MANIFEST).read_text())['iteration']


class _Handler(JsonHandler):
    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.read())
        try:
            assert self.path == '/update_weights_from_disk', self.path
            self.server.load(Path(request['model_path']))
        except Exception as error:
            self.server.wrong.append(repr(error))
            self.answer(400, {'success': False, 'message': repr(error)})
        else:
            self.answer(200, {'success': True, 'message': 'Succeeded to update model weights.'})
