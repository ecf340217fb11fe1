"""By what one start of a server is told from the next."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sideband.engines.vllm.processes import ENGINE_PROCESS, server_process
from tests.unit.engines.vllm.fakes import script_for
from tests.unit.engines.vllm.running import Server, server

PROMPT = [1, 2, 3, 4, 5]
STAT = "41 (a (b) c) S 1 41 41 0 -1 4194560 1 0 0 0 4 2 0 0 20 0 9 0 {start} 1 2 3\n"


def proc_of(tmp_path: Path, *, start: object = 990017, boot_id: str = "0b1c") -> Path:
    """A /proc of a machine, where a launcher runs as process 41."""
    (tmp_path / "41").mkdir()
    (tmp_path / "41" / "stat").write_text(STAT.format(start=start))
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(boot_id + "\n")
    return tmp_path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has a launcher."""
    launcher = SimpleNamespace(pid=41)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: launcher)


def test_every_start_of_a_process_alone_has_a_word_of_its_own(launched: None) -> None:
    words = {server_process(api_processes=1) for _ in range(9)}
    assert len(words) == 9
    assert None not in words


def test_all_processes_of_one_launcher_have_one_word(tmp_path: Path, launched: None) -> None:
    proc = proc_of(tmp_path)
    words = {server_process(api_processes=4, proc=proc) for _ in range(4)}
    assert words == {"0b1c.41.990017"}


def test_a_launchers_word_is_read_off_this_machine() -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        words = {each.get(60) for each in [pool.apply_async(_word) for _ in range(4)]}
    (word,) = words
    assert word is not None
    assert word.split(".")[1] == str(multiprocessing.current_process().pid)


def _word() -> str | None:
    return server_process(api_processes=2)


@pytest.mark.parametrize("wrong", [{"start": 0}, {"boot_id": ""}])
def test_a_machine_that_does_not_tell_gives_no_word(
    tmp_path: Path, launched: None, wrong: dict[str, Any]
) -> None:
    assert server_process(api_processes=2, proc=proc_of(tmp_path, **wrong)) is None


def test_a_launcher_whose_status_is_short_gives_no_word(tmp_path: Path, launched: None) -> None:
    proc = proc_of(tmp_path)
    (proc / "41" / "stat").write_text("41 (a) S 1")
    assert server_process(api_processes=2, proc=proc) is None


def test_without_a_launcher_or_a_number_there_is_no_word(tmp_path: Path) -> None:
    assert server_process(api_processes=2, proc=tmp_path) is None
    assert server_process(api_processes=0) is None


def test_a_launcher_that_has_gone_gives_no_word(tmp_path: Path, launched: None) -> None:
    assert server_process(api_processes=2, proc=tmp_path) is None


async def last_said(running: Server, **asked: Any) -> list[object]:
    """The word of each event of a stream."""
    events = await running.events(running.request(PROMPT, stream=True, **asked))
    return [event.get(ENGINE_PROCESS) for event in events]


@pytest.mark.parametrize("extra", [None, {}, {"payload_debug": True}])
@pytest.mark.parametrize("choices", [1, 3])
async def test_answers_say_which_start_of_the_server_gave_them(
    tmp_path: Path, extra: dict[str, Any] | None, choices: int
) -> None:
    running = server(tmp_path, script_for(5, choices=choices))
    asked = {"n": choices} if extra is None else {"n": choices, "extra": extra}
    word = running.state.process
    assert word is not None
    assert (await running.answer(running.request(PROMPT, **asked)))[ENGINE_PROCESS] == word
    said = await last_said(running, **asked)
    assert said == [None] * (len(said) - 2) + [word, None]  # usage follows


async def test_a_server_that_cannot_tell_says_nothing(tmp_path: Path) -> None:
    running = server(tmp_path, script_for(5), api_processes=0)
    assert ENGINE_PROCESS not in await running.answer(running.request(PROMPT))
    assert set(await last_said(running)) == {None}
    assert (await running.state.shown())[ENGINE_PROCESS] is None
