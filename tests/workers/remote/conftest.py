"""What tests of agents share."""

from __future__ import annotations

import asyncio

import pytest

from asyncloader.engine.portal import get_portal


@pytest.fixture(scope="session", autouse=True)
def portal_has_listened(process_wide_singletons: None) -> None:
    """Have the portal's loop listen once: libuv keeps a descriptor of /dev/null from then on."""

    async def listen() -> None:
        loop = get_portal().loop
        server = await loop.create_server(lambda: None, "127.0.0.1", 0)  # type: ignore[arg-type,return-value]
        server.close()
        await server.wait_closed()

    asyncio.run_coroutine_threadsafe(listen(), get_portal().loop).result(10)
