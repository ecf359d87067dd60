"""Every error a user can meet, and what it turns into.

HeadraceError
├── UsageError             a flag, path or value the person gave                  exit 2
├── ModelError             a model file or folder; names the file and the field   exit 2
│   └── UnsupportedModel   well-formed, but of a kind that is not known here      exit 2
├── MemoryBudgetExceeded   the ledger does not fit, with the numbers              exit 2
└── RequestError           one client's request; has a status, a code and a param
    ├── InvalidRequest             400 invalid_value (or another code given)
    ├── UnsupportedParameter       400 unsupported_parameter
    ├── ContextLengthExceeded      400 context_length_exceeded, with both numbers
    ├── ModelNotFound              404 model_not_found
    ├── DeadlineExceeded           408 deadline_exceeded: the request's own deadline_ms
    ├── TooManyRequests            429 rate_limit_exceeded
    │   ├── QueueFull                  ... for all
    │   ├── QueueTimeExceeded          ... queue_time_exceeded: it would wait longer than it may
    │   └── RateLimited                ... for one key: its own limits
    ├── Unavailable                503 unavailable: loading, draining, engine down
    └── EngineFailed               500 engine_error
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error whose text may be shown to a person."""


class UsageError(HeadraceError):
    """A flag, a path or a value the person gave cannot be used."""


class ModelError(HeadraceError):
    """A model file cannot be loaded. The message names the file and the field."""

    def __init__(self, file: object, field: str, problem: str) -> None:
        super().__init__(f"{file}: {field}: {problem}" if field else f"{file}: {problem}")
        self.file = str(file)
        self.field = field


class UnsupportedModel(ModelError):
    """The file is well-formed, but its architecture, type or tokenizer is not known here."""


class MemoryBudgetExceeded(HeadraceError):
    """The ledger's total exceeds the budget. The message gives the numbers."""


class RequestError(HeadraceError):
    """One request is refused. `message` is safe to send to the client."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None
    retry_after_s = 1.0  # for what will pass: 429 and 503

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    code = "invalid_value"


class UnsupportedParameter(RequestError):
    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class DeadlineExceeded(RequestError):
    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"


class TooManyRequests(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class QueueFull(TooManyRequests):
    pass


class QueueTimeExceeded(TooManyRequests):
    code = "queue_time_exceeded"


class RateLimited(TooManyRequests):
    pass


class Unavailable(RequestError):
    status = 503
    type = "server_error"
    code = "unavailable"


class EngineFailed(RequestError):
    status = 500
    type = "server_error"
    code = "engine_error"
