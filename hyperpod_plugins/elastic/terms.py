"""On which terms a job changes its size: its founders leave them in the ledger, and everybody reads them there."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from hyperpod_plugins.elastic.layouts import Layout
from hyperpod_plugins.elastic.ledger import Ledger
from hyperpod_plugins.elastic.policy import ElasticPolicy

_TERMS = "elastic"  # value: `Terms`


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which a job grows and shrinks."""

    policy: ElasticPolicy
    replica_size: int
    """Ranks of one replica: shard degree x tensor degree."""
    sizes: tuple[int, ...]
    """Numbers of replicas that the policy allows and that can share the global batch."""
    tensor_degree: int = 1
    layouts: tuple[Layout, ...] = ()
    """Degrees in which all processes may start again, in the order in which they are tried."""

    @property
    def degrees(self) -> tuple[int, int]:
        """Shard degree and tensor degree of the present world."""
        return self.replica_size // self.tensor_degree, self.tensor_degree

    def to_json(self) -> bytes:
        """For the ledger."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Terms":
        """Inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        policy = values["policy"] | {"replica_sizes": tuple(values["policy"]["replica_sizes"])}
        layouts = tuple(Layout(**each | {"sizes": tuple(each["sizes"])}) for each in values["layouts"])
        whole: dict[str, Any] = {"policy": ElasticPolicy(**policy), "sizes": tuple(values["sizes"]), "layouts": layouts}
        return cls(**values | whole)


def leave_terms(ledger: Ledger, terms: Terms) -> None:
    """Let others come in from now on; the first word counts."""
    ledger.put_first(_TERMS, terms.to_json())


def terms_of(ledger: Ledger) -> Terms | None:
    """The terms of the job; None for one that does not change its size."""
    text = ledger.find(_TERMS)
    return None if text is None else Terms.from_json(text)
