"""Frozen data as one line of JSON, the form in which agents and members leave it in a store."""

import json
from dataclasses import asdict
from typing import Any, Self, cast


class Line:
    """Abstract base of dataclasses whose fields JSON knows."""

    __slots__ = ()

    def to_json(self) -> str:
        """One line of JSON, the same for equal values."""
        return json.dumps(asdict(cast("Any", self)))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))
