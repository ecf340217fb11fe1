"""A discarded session must not take a sibling choice's file along, nor leave what nobody names."""

from pathlib import Path

from tests.services.orchestrator.support import orchestrator


async def test_an_aborted_choice_keeps_the_session_that_its_sibling_trains_on(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path) as bench:
        await bench.lease("r0", "g", size=2, session_id="s")
        other = await bench.lease("r1", "g", size=2, session_id="s")
        turn = await bench.write("q", [1, 2, 3], [4, 5, 6])
        receipt = await bench.deliver("r0", {**turn, "choice_count": 2})
        assert receipt.json()["accepted"]
        await bench.http.delete(f"/v1/leases/{other['lease_id']}")
        await bench.until(lambda: bool(bench.feed.steps), "the sibling is shipped")
        assert bench.proxy.discarded == []
        assert len(bench.on_disk()) == 1


async def test_the_session_goes_with_the_last_of_its_choices(tmp_path: Path) -> None:
    async with orchestrator(tmp_path) as bench:
        leases = [await bench.lease(f"r{i}", "g", size=2, session_id="s") for i in range(2)]
        for lease in leases:
            assert bench.proxy.discarded == []
            await bench.http.delete(f"/v1/leases/{lease['lease_id']}")
        await bench.until(lambda: bench.proxy.discarded == ["s"], "the session is discarded")


async def test_a_failed_rollout_discards_its_session_whatever_its_turns_name(
    tmp_path: Path,
) -> None:
    async with orchestrator(tmp_path) as bench:
        await bench.lease("r0", session_id="s")
        receipt = await bench.deliver("r0", status="failed")
        assert receipt.json()["dropped"] == {"failed": 1}
        await bench.until(lambda: bench.proxy.discarded == ["s"], "the session is discarded")
