"""An endpoint for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.environments.endpoint.chat_endpoint import ChatEndpoint


@pytest.fixture(scope="session")
def endpoint() -> Iterator[ChatEndpoint]:
    served = ChatEndpoint()
    try:
        yield served
    finally:
        served.shutdown()
