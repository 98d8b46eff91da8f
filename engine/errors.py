"""How an engine or a request fails, as whoever asked is told."""


class EngineError(RuntimeError):
    """The engine failed while it ran a request; the request has ended."""


class EngineDeadError(EngineError):
    """The engine process is gone, or was never there; nothing can run any more."""


class EngineStalledError(EngineDeadError):
    """The engine process shows no sign of life. It may go on later, without the requests that ran."""


class RequestError(ValueError):
    """A request that can never run. The text names the field and the limit."""
