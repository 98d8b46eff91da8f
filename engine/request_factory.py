"""Engine requests from what a caller asks for: ids, seeds, and n choices as n requests."""

import itertools
import random
import time

import msgspec

from mambalign.engine.messages import EngineRequest
from mambalign.worker.sampling_params import SamplingParams


class RequestFactory:
    """Makes engine requests: unique ids, a seed for who brings none, one request per choice."""

    def __init__(self, seed: int):
        self._seeds = random.Random(seed)
        self._ids = itertools.count()

    def split(self, prompt_token_ids: list[int], params: SamplingParams, cache_salt: str = "") -> list[EngineRequest]:
        """`params.n` requests, choices 0 to n-1, with one seed: (seed, choice, position) gives the noise."""
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        name, now = f"request-{next(self._ids)}", time.time()
        single = msgspec.structs.replace(params, seed=seed, n=1)
        return [
            EngineRequest(f"{name}-{choice}", prompt_token_ids, single, choice, now, cache_salt)
            for choice in range(params.n)
        ]
