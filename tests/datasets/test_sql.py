"""Rows of a real PostgreSQL: order, missing keys, one query a batch, failures, a server that is killed."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import asyncpg
import pytest

from asyncloader.datasets import FetchError, Retries, SQLDataset
from tests.services.postgres import PostgreSQL

QUERY = "SELECT id, square, word FROM numbers WHERE id = ANY($1)"
BRISK = Retries(tries=4, first_wait_s=0.005, longest_wait_s=0.01, total_s=20)


def dataset_of(database: PostgreSQL, keys: Any, **options: Any) -> SQLDataset[Any]:
    return SQLDataset(database.dsn, options.pop("query", QUERY), keys, **{"retries": BRISK, **options})


async def test_rows_come_in_the_order_of_their_keys(database: PostgreSQL) -> None:
    """Whatever order the server has, and with repetitions; as dicts, or decoded off the loop; also after a pickle."""
    keys = [7, 3, 999, 0, 3]
    async with pickle.loads(pickle.dumps(dataset_of(database, keys))) as dataset:
        assert await dataset[2] == {"id": 999, "square": 998001, "word": "word 999"}
        assert [row["id"] for row in await dataset.__getitems__([0, 1, 2, 3, 4, 0])] == [*keys, 7]

    def decode(row: Any) -> tuple[int, bool]:
        return row["square"], threading.current_thread() is threading.main_thread()

    async with dataset_of(database, keys, decode=decode) as dataset:
        assert await dataset.__getitems__([4, 0]) == [(9, False), (49, False)]


async def test_keys_can_be_selected(database: PostgreSQL) -> None:
    """A query in the place of keys is run at construction, also where a loop is running."""
    dataset = dataset_of(database, "SELECT id FROM numbers WHERE id % 100 = 0 ORDER BY id DESC")
    assert dataset.keys == list(range(900, -1, -100))
    async with dataset:
        assert (await dataset[0])["square"] == 810_000


async def test_a_batch_is_one_query(database: PostgreSQL) -> None:
    """The server counts the calls; batches at once take a connection each, and no more than there may be."""
    for statement in (
        "CREATE SEQUENCE calls",
        "CREATE FUNCTION counted(int[]) RETURNS SETOF numbers LANGUAGE sql VOLATILE AS "
        "$$ SELECT nextval('calls'), pg_sleep(0.05); SELECT * FROM numbers WHERE id = ANY($1) $$",
    ):
        await asyncio.to_thread(database.execute, statement)
    try:
        named = {"server_settings": {"application_name": "this test"}}
        counted = dataset_of(
            database, range(1000), query="SELECT * FROM counted($1)", max_connections=3, connect_options=named
        )
        async with counted as dataset:
            batches = [list(range(start, start + 50)) for start in range(0, 1000, 50)]
            found = await asyncio.gather(*map(dataset.__getitems__, batches))
            sessions = await asyncio.to_thread(
                database.execute, "SELECT FROM pg_stat_activity WHERE application_name = 'this test'"
            )
        assert [row["id"] for rows in found for row in rows] == list(range(1000))
        assert len(sessions) == 3
        (calls,) = await asyncio.to_thread(database.execute, "SELECT last_value FROM calls")
        assert calls[0] == 20
    finally:
        for statement in ("DROP FUNCTION counted", "DROP SEQUENCE calls"):
            await asyncio.to_thread(database.execute, statement)


async def test_missing_keys_are_named(database: PostgreSQL) -> None:
    """All of a batch, and only those; the other samples of the dataset stay as they are."""
    async with dataset_of(database, [1, 1001, 2, -5]) as dataset:
        with pytest.raises(KeyError) as caught:
            await dataset.__getitems__([0, 1, 2, 3])
        assert caught.value.args == (1001, -5)
        with pytest.raises(KeyError, match="1001"):
            await dataset[1]
        assert (await dataset[2])["square"] == 4


async def test_two_rows_of_one_key_are_an_error(database: PostgreSQL) -> None:
    """Which of them is the sample depends on the server; a key that is asked for twice is none."""
    query = "SELECT id, square FROM numbers, generate_series(1, 2) AS n WHERE id = ANY($1) AND (id < 5 OR n = 1)"
    async with dataset_of(database, [3, 7, 7], query=query) as dataset:
        assert [row["id"] for row in await dataset.__getitems__([1, 2, 1])] == [7, 7, 7]
        with pytest.raises(ValueError, match="the query gives 2 rows for the key 3, and which of them is the sample"):
            await dataset.__getitems__([1, 0])


async def test_what_is_wrong_with_a_query_is_told_at_once(database: PostgreSQL) -> None:
    """As asyncpg tells it, without another try."""
    async with dataset_of(database, [1], query="SELECT id FROM no_such_table WHERE id = ANY($1)") as dataset:
        with pytest.raises(asyncpg.UndefinedTableError, match="no_such_table"):
            await dataset[0]
    with pytest.raises(asyncpg.UndefinedColumnError, match="no_such_column"):
        dataset_of(database, "SELECT no_such_column FROM numbers")


async def test_connections_that_the_server_ends_are_made_anew(database: PostgreSQL) -> None:
    """In the middle of a query, and between two."""
    slow = "SELECT id, square, pg_sleep(0.2) FROM numbers WHERE id = ANY($1)"
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'this test'"
    named = {"server_settings": {"application_name": "this test"}}
    async with dataset_of(database, [4, 5], query=slow, connect_options=named) as dataset:
        row = asyncio.create_task(dataset[0])
        while not any(await asyncio.to_thread(database.execute, end)):
            pass
        assert (await row)["square"] == 16
        await asyncio.to_thread(database.execute, end)
        assert (await dataset[1])["square"] == 25


async def test_queries_that_take_too_long_are_given_up(database: PostgreSQL) -> None:
    """Each try for itself, and then as a whole; a cancelled query leaves the pool usable."""
    slow = "SELECT id, square, pg_sleep(id) FROM numbers WHERE id = ANY($1)"
    async with dataset_of(database, [60, 0], query=slow, query_timeout_s=0.05) as dataset:
        with pytest.raises(FetchError, match=r"^row 60 from PostgreSQL at .*: TimeoutError \(4 tries\)$"):
            await dataset[0]
        assert (await dataset[1])["id"] == 0
    async with dataset_of(database, [60, 0], query=slow) as dataset:
        hanging = asyncio.create_task(dataset[0])
        await asyncio.sleep(0.05)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (await dataset[1])["id"] == 0


@pytest.mark.services
async def test_a_server_that_was_killed_and_came_back_costs_nothing() -> None:
    """Killed between batches and started again: the next batches come. Out of reach: an error in bounded time."""
    keys = list(range(200))
    query = "SELECT n, n * n FROM generate_series(0, 199) n WHERE n = ANY($1)"
    patient = Retries(tries=1000, first_wait_s=0.02, longest_wait_s=0.1, total_s=60)
    room = await asyncio.to_thread(PostgreSQL().__enter__)
    try:
        dataset = SQLDataset(room.dsn, query, keys, retries=patient)
        away = SQLDataset(room.dsn.replace("tester@", "tester:secret@"), query, keys, retries=BRISK)
        async with dataset, away:
            await asyncio.gather(*(dataset.__getitems__([n]) for n in range(4)))
            await asyncio.to_thread(room.kill)
            rows = asyncio.gather(*(dataset.__getitems__(list(range(n, n + 10))) for n in range(0, 200, 10)))
            with pytest.raises(
                FetchError, match=r"^row 1 from PostgreSQL at 127\.0\.0\.1:\d+/postgres: .*\(4 tries\)$"
            ):
                await away[1]  # and the password is not in the message
            await asyncio.to_thread(room.start)
            assert [row["n"] for batch in await rows for row in batch] == keys
    finally:
        await asyncio.to_thread(room.__exit__)
