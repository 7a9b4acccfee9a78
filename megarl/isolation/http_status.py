"""What all services have in common that are asked over HTTP: names, certificates, and statuses worth a further try."""

from __future__ import annotations

import functools
import math
import ssl
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from urllib.parse import urlsplit

from megarl.isolation.service import Unavailable

_TOO_MANY_REQUESTS = 429
_FIRST_OF_SERVER = 500


@functools.cache
def certificates() -> ssl.SSLContext:
    """Read once, because it takes a tenth of a second."""
    return ssl.create_default_context()


def host_of(url: str) -> str:
    """The host of an address, with its port where it has one: the name of a service."""
    parts = urlsplit(url)
    if parts.port is None:
        return str(parts.hostname)
    return f"{parts.hostname}:{parts.port}"


def require_available(status: int, headers: Mapping[str, str]) -> None:
    """Raise Unavailable where a further try may have an answer: of 429 and 5xx, after what `Retry-After` asks."""
    if status == _TOO_MANY_REQUESTS or status >= _FIRST_OF_SERVER:
        raise Unavailable(f"status {status}", wished_wait_s(headers.get("Retry-After", "")))


def wished_wait_s(header: str) -> float:
    """Seconds of a Retry-After header (RFC 9110, 10.2.3): a number or a date; 0 where it is neither."""
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(header).timestamp() - time()
        except ValueError:
            return 0.0
    return max(wait_s, 0.0) if math.isfinite(wait_s) else 0.0
