"""The front of the server: what stands between a client and the engine beside the request itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.server.queue import Queue
from headrace.server.quotas import NO_QUOTA, Quotas
from headrace.server.report import Reporter


@dataclass(slots=True)
class Front:
    """One of each, for the whole server."""

    queue: Queue = field(default_factory=Queue)
    quotas: Quotas = field(default_factory=lambda: Quotas(NO_QUOTA))
    reporter: Reporter = field(default_factory=Reporter)
