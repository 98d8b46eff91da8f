"""An engine core run until it has nothing to do."""

from mambalign.engine.core import EngineCore
from mambalign.engine.messages import EngineOutput


def run(core: EngineCore) -> dict[str, list[EngineOutput]]:
    """Outputs by request. The core's own checks run after every step."""
    outputs: dict[str, list[EngineOutput]] = {}
    while core.has_work():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        core.check()
    return outputs


def token_ids(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]
