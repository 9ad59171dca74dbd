"""The exceptions of this package. A message says where the error is, what was expected and found, and the remedy."""

from __future__ import annotations


class XhfError(Exception):
    """Base of every error that this package raises on purpose."""


class OptionError(XhfError, ValueError):
    """An option has an invalid value, or two options conflict. Raised when the hook is built."""

    def __init__(self, option: str, expected: str, found: object) -> None:
        super().__init__(f'option {option}: expected {expected}, found {found!r}')
        self.option = option


class InstalledError(XhfError):
    """An installed package is too old, or does not work with another one."""


class ModelError(XhfError):
    """The trained model cannot be exported: not found, ambiguous, or not what ``from_pretrained`` would build."""


class CheckpointError(XhfError):
    """A checkpoint on disk cannot be read: it is incomplete, damaged, inconsistent, unsupported, or no checkpoint."""


class ConfigError(XhfError):
    """The config of a finished run is missing, cannot be read, or does not say how its model was built."""


class BaseModelError(XhfError):
    """The base model, from which training started, is missing or is not the one that was used."""


class DamagedError(XhfError):
    """A file of a model folder is incomplete, malformed, or does not match the rest of the folder."""


class PlanError(XhfError):
    """The plan of a save is impossible."""


class TensorError(XhfError):
    """A tensor does not have the shape or dtype that the plan expects."""


class TargetError(XhfError):
    """The output folder cannot be used: not writable, in use, too small, or not ours to replace."""


class StoreError(TargetError, OSError):
    """An object store cannot be reached, refuses a request, or has lost data."""


class LimitError(XhfError):
    """A limit of the system is too low for a save."""


class IncompleteError(XhfError):
    """A staging folder lacks something that was planned, so it must not be committed."""


class SharedError(XhfError):
    """Base of the errors that the other ranks raise, too, or notice by themselves; so no vote follows on them.

    Its kinds: a rank has failed (:class:`AgreedError`), cannot be reached (:class:`RankLostError`), or holds another
    model than the others (:class:`RanksDifferError`).
    """


class RankLostError(SharedError):
    """A rank did not take part in a vote: it died, or exceeded the time-out."""


class RanksDifferError(SharedError):
    """Ranks hold different models, or replicas that are not equal."""


class AgreedError(SharedError):
    """Some ranks failed; says in which stage, on which ranks, and why.

    Attributes:
        stage (str): Stage of the save that failed, for example ``'write'``.
        failures (dict[int, str]): Rank to the text of its error; ranks that did not fail are absent.
    """

    def __init__(self, stage: str, failures: dict[int, str]) -> None:
        lines = [f'rank {rank}: {text}' for rank, text in sorted(failures.items())]
        super().__init__(f'stage {stage!r} failed on ' + '; '.join(lines))
        self.stage = stage
        self.failures = failures
