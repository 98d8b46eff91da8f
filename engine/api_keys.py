"""The API keys that clients must bring, and how one is checked. Nothing is kept of a key but its hash."""

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from mambalign.engine.config import ServerConfig
from mambalign.engine.option import ConfigError

ENVIRONMENT = "MAMBALIGN_API_KEY"


class ApiKeys:
    """Any number of keys; none means that everybody may ask."""

    def __init__(self, keys: list[str]):
        self._hashes = [hash_of(key) for key in keys]

    @classmethod
    def read(cls, options: ServerConfig, environ: Mapping[str, str] = os.environ) -> "ApiKeys":
        """From --api-key and the environment (separated by commas) and --api-key-file (one a line, # comments).

        Raises ConfigError when the file cannot be read or a place that is given holds no key.
        """
        places = {"--api-key": options.api_key, ENVIRONMENT: environ.get(ENVIRONMENT)}
        lines = {name: text.split(",") for name, text in places.items() if text is not None}
        if options.api_key_file is not None:
            try:
                lines["--api-key-file"] = Path(options.api_key_file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"--api-key-file {options.api_key_file}: cannot be read: {reason}") from error
        keys = []
        for name, given in lines.items():
            found = [key.strip() for key in given if key.strip() and not key.strip().startswith("#")]
            if not found:
                raise ConfigError(f"{name}: holds no key")
            keys += found
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def allow(self, authorization: str) -> bool:
        """Whether an Authorization header brings one of the keys; takes as long for a wrong one as for a right one."""
        scheme, _, key = authorization.partition(" ")
        given, found = hash_of(key.strip()), False
        for known in self._hashes:
            found |= hmac.compare_digest(given, known)
        return found and scheme.lower() == "bearer"


def hash_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
