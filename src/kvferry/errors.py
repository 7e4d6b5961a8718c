"""The errors a user can meet: each says what is wrong, what was expected and what to do."""

from collections.abc import Sequence


class KVFerryError(Exception):
    """Base of every error that kvferry raises for a mistake in its input or environment.

    Args:
        problem: one sentence, what went wrong.
        fix: one sentence, what the reader can do now.
        found: what was there, if that helps.
        expected: what should have been there, if that helps.
    """

    def __init__(
        self,
        problem: str,
        *,
        fix: str,
        found: object | None = None,
        expected: object | None = None,
    ) -> None:
        self.problem = problem
        self.fix = fix
        self.found = found
        self.expected = expected
        super().__init__(self.render())

    def render(self) -> str:
        """The whole message, one fact a line."""
        lines = [self.problem]
        if self.found is not None:
            lines.append(f"  found:    {self.found}")
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        lines.append(f"  to do:    {self.fix}")
        return "\n".join(lines)


class InputError(KVFerryError):
    """A document, passage or token sequence cannot be used."""


class UnsupportedModelError(KVFerryError):
    """The architecture has no key-value cache that kvferry can map."""


class UnsupportedTransformersError(KVFerryError):
    """The installed transformers lacks the cache interface that kvferry drives."""


class ModelUnavailableError(KVFerryError):
    """Weights are missing, gated, truncated or cannot be fetched."""


class DataUnavailableError(KVFerryError):
    """A text or data set is missing or unreadable."""


class StorageError(KVFerryError):
    """The disk is full or a folder cannot be written."""


class ArtefactError(KVFerryError):
    """A mapper folder is damaged or does not belong to this pair."""


class HubError(KVFerryError):
    """A mapper cannot be fetched from the hub or published there."""


class ConfigurationError(KVFerryError):
    """One or more settings are wrong; all of them are listed."""


class SettingsError(ConfigurationError):
    """Settings of one thing are out of range.

    Args:
        rules: what they must be, a sentence each that opens with the setting.
        fix: see :class:`KVFerryError`.
    """

    def __init__(self, rules: Sequence[str], *, fix: str) -> None:
        self.rules = tuple(rules)
        super().__init__(f"Settings are out of range: {'; '.join(rules)}.", fix=fix)
