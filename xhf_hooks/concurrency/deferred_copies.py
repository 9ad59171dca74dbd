"""Copies weights during forward and backward passes, which do not change them."""

from __future__ import annotations

import os
import threading
import time

import torch
from torch import nn

from xhf_hooks.errors import TensorError


class DeferredCopies:
    """Pending copies, which training waits for before weights change. Used by: training's thread, except :meth:`run`.

    Args:
        optimizer: Its step is the first thing in an iteration that changes weights; None: no copies are accepted.
        model: Loading a state dict into it waits, too, as that changes weights.

    Attributes:
        nbytes: Bytes added since the last :meth:`clear`.
        waited_secs: How long :meth:`wait` has blocked training since then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None, model: nn.Module | None = None) -> None:
        self._todo: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._none_left = threading.Event()
        self._process = os.getpid()
        self.clear()
        self._handles = [] if optimizer is None else [optimizer.register_step_pre_hook(self.wait)]
        if self._handles and model is not None:
            # Private before torch 2.5, and called once for the module, too, before those inside of it are loaded
            register = getattr(model, 'register_load_state_dict_pre_hook', model._register_load_state_dict_pre_hook)
            self._handles.append(register(self.wait))

    def accepts(self, source: torch.Tensor) -> bool:
        """Whether this tensor can be copied later. A GPU tensor cannot: that is not known to be safe."""
        return bool(self._handles) and source.device.type == 'cpu'

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add a copy for :meth:`run`."""
        self._none_left.clear()
        self._todo.append((target, source, source._version))
        self.nbytes += source.nbytes

    def run(self) -> None:
        """Make the copies. Runs on: any thread.

        Raises:
            TensorError: Something that does not wait changed a weight.
        """
        try:
            for target, source, version in self._todo:
                target.copy_(source)
                if source._version != version:
                    raise TensorError(
                        'a weight was changed between the save and the next optimizer step, while it was copied. Set '
                        'defer_copy=False, or change weights elsewhere'
                    )
        finally:
            self._todo = []
            self._none_left.set()

    def wait(self, *_: object) -> None:
        """Wait until weights may change."""
        if not self._none_left.is_set() and self._process == os.getpid():  # a forked child has no copying thread
            began = time.perf_counter()
            self._none_left.wait()
            self.waited_secs += time.perf_counter() - began

    def clear(self) -> None:
        """Drop copies that were not made. :meth:`run` must not be active."""
        self._todo, self.nbytes, self.waited_secs = [], 0, 0.0
        self._none_left.set()

    def close(self) -> None:
        """Remove the hooks from optimizer and model."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[type[DeferredCopies], tuple[()]]:
        return DeferredCopies, ()  # the model refers to this object; a copy of the model has nothing to wait for
