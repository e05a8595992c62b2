"""Problems found in the data, gathered so that a user sees several at once."""

from __future__ import annotations

from tandem.errors import DataError

MAX_PROBLEMS = 5  # enough to see a pattern; a file with one fault in every row would fill the screen


class Problems:
    """The errors found so far. They are raised together, as one DataError."""

    def __init__(self) -> None:
        self._errors: list[DataError] = []

    def add(self, error: DataError) -> None:
        """Keep `error` for later.

        Raises:
            DataError: There are enough of them; reading on would tell nothing new.
        """
        self._errors.append(error)
        if len(self._errors) == MAX_PROBLEMS:
            raise self._summary(more=True)

    def raise_if_any(self) -> None:
        """End of the reading.

        Raises:
            DataError: There were problems.
        """
        if self._errors:
            raise self._summary(more=False)

    def _summary(self, *, more: bool) -> DataError:
        if len(self._errors) == 1:
            return self._errors[0]
        lines = ["  - " + error.message.replace("\n", "\n    ") for error in self._errors]  # one may be a list, too
        if more:
            lines.append("  (stopped looking here; there may be more)")
        remedies = dict.fromkeys(error.remedy for error in self._errors if error.remedy is not None)
        message = "\n".join([f"{len(self._errors)} problems in the data:", *lines])
        return DataError(message, remedy="\n  -> ".join(remedies) or None)
