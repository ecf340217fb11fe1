"""Batches of requests to a real vLLM by handle, inline, and to the same server without the plugin.

The servers run on this machine's processor, where ``python -m scripts.vllm_env`` built them. Both
are started before anything is timed. Batches alternate; a server that had nothing to do sleeps and
wakes up slowly, so a short batch that is not timed comes before each. Routing is captured only with
a prefix cache, so no server gets a prompt twice: by handle and without the plugin the prompts are
the same, inline they are others of the same length.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import orjson
from msgspec.structs import replace

from bench.http.burst import burst
from bench.http.load import WrongAnswer
from bench.registry import Row
from bench.results import Claim, RowResult
from bench.scale import Scale
from bench.timing import Timings, paired
from scripts.vllm_env.build import Line
from scripts.vllm_env.servers import running, start, why_not
from sideband.ids import RunId
from sideband.payload.root import PayloadRoot

HANDLE: Final = "with the plugin, by handle"
INLINE: Final = "with the plugin, inline"
WITHOUT: Final = "without it, inline"
RUN: Final = RunId("bench")
# It answers with rows and masks. 0.30 has no masks here, and its two processes spin on both cores
# of a small machine: a batch takes one time or five, on every side.
LINE: Final[Line] = "0.32"
# Every plugin of the environment but ours; without the first, it does not run on a processor.
OTHERS: Final = "triton_cpu,lora_filesystem_resolver,lora_hf_hub_resolver"
VOCAB_SIZE: Final = 1024
PROMPT_TOKENS: Final = 128
TOKENS: Final = 8
WAKE_TOKENS: Final = 2
WAKE_NUMBER: Final = 1_000_000  # the first of the batches that wake up
Side = Callable[[], object]


def measure(scale: Scale) -> RowResult:
    """The time of a batch on each side; in words, where there is no vLLM."""
    in_flight = scale.pick(tiny=2, quick=8, full=8)
    rounds = scale.pick(tiny=1, quick=11, full=41)
    reason = why_not(LINE)
    result = RowResult(
        name="plugin_overhead",
        title="What the plugin adds to a real vLLM",
        setting=f"vLLM {LINE}, a tiny random model on the processor, rows and masks captured; "
        f"{rounds} rounds of batches of {in_flight} requests at once, {PROMPT_TOKENS} + "
        f"{TOKENS} tokens each: one server by handle and inline, another that was started without "
        "the plugin. Client, API server and engine share the machine's cores",
        notes=[] if reason is None else [f"Left out: {reason}"],
    )
    if reason is not None:
        return result
    with servers() as (plugin, bare, root):
        asked = partial(sides, plugin, bare, root, in_flight=in_flight)
        wake = asked(tokens=WAKE_TOKENS, first=WAKE_NUMBER)
        timings = paired(asked(tokens=TOKENS, first=0), rounds=rounds, wake=wake)
    tokens = in_flight * TOKENS
    return replace(
        result,
        measurements=[
            timings.measurement(side, units=tokens, unit="tokens/s") for side in timings.seconds
        ],
        claims=_claims(timings),
        notes=[_spread(timings)],
    )


@contextmanager
def servers() -> Iterator[tuple[int, int, Path]]:
    """The ports of two servers, with the plugin and without, and the payload root of the first."""
    with TemporaryDirectory(prefix="sideband-bench-") as folder:
        root = Path(folder) / "payloads"
        PayloadRoot.create(root, RUN, fresh=True)
        plugin = start(LINE, Path(folder) / "plugin.log", root=root)
        bare = start(LINE, Path(folder) / "bare.log", variables={"VLLM_PLUGINS": OTHERS})
        with running(plugin, bare):
            yield plugin.port, bare.port, root


def sides(
    plugin: int, bare: int, root: Path, *, in_flight: int, tokens: int, first: int
) -> dict[str, Side]:
    """How each of the three sides answers its next batch; batches are numbered from ``first``."""
    asked = partial(_side, in_flight=in_flight, tokens=tokens)
    extra = {"payload_dir": f"{root}/v0", "payload_run_id": RUN}
    return {
        HANDLE: asked(plugin, count(first, 2), extra_args=extra),
        INLINE: asked(plugin, count(first + 1, 2), extra_args={}),
        WITHOUT: asked(bare, count(first, 2), extra_args={}),
    }


def _side(
    port: int, numbers: Iterator[int], *, extra_args: dict[str, str], in_flight: int, tokens: int
) -> Side:
    """Answers a new batch at each call, by its number."""

    def answer() -> object:
        bodies = batch(next(numbers), extra_args, in_flight=in_flight, tokens=tokens)
        found = burst(port, bodies)
        _check(found, is_by_handle=bool(extra_args), tokens=tokens)
        return found

    return answer


def batch(number: int, extra_args: dict[str, str], *, in_flight: int, tokens: int) -> list[bytes]:
    """Requests of exactly ``tokens`` tokens each, whatever is sampled."""
    prompts = np.random.default_rng(number).integers(0, VOCAB_SIZE, (in_flight, PROMPT_TOKENS))
    sampling: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 20,
        "max_tokens": tokens,
        "ignore_eos": True,
        **({"extra_args": extra_args} if extra_args else {}),
    }
    return [
        orjson.dumps(
            {
                "token_ids": prompt.tolist(),
                "request_id": f"batch-{number}-{place}",
                "sampling_params": {**sampling, "seed": place},
            }
        )
        for place, prompt in enumerate(prompts)
    ]


def _check(found: list[bytes], *, is_by_handle: bool, tokens: int) -> None:
    """That a side did the work. Raises WrongAnswer."""
    for content in found:
        answer = orjson.loads(content)
        (choice,) = answer["choices"]
        rows_told = [bool(answer.get("payload_segments")), choice["routed_experts"] is not None]
        if len(choice["token_ids"]) != tokens or rows_told != [is_by_handle, not is_by_handle]:
            raise WrongAnswer(f"{content[:500]!r}")


def _claims(timings: Timings) -> list[Claim]:
    pairs = zip(timings.seconds[HANDLE], timings.seconds[WITHOUT], strict=True)
    return [
        Claim(
            what="added to a batch by handle",
            value=100 * (timings.ratio(HANDLE, WITHOUT) - 1),
            unit="%",
            target=2,
            is_ceiling=True,
        ),
        Claim(
            what="the same in time",
            value=1e3 * median(first - second for first, second in pairs),
            unit="ms",
        ),
        Claim(
            what="added to a batch inline",
            value=100 * (timings.ratio(INLINE, WITHOUT) - 1),
            unit="%",
            target=2,
            is_ceiling=True,
        ),
    ]


def _spread(timings: Timings) -> str:
    """How far the paired rounds lie apart: a difference below this is noise."""
    pairs = zip(timings.seconds[HANDLE], timings.seconds[WITHOUT], strict=True)
    added = [100 * (first / second - 1) for first, second in pairs]
    if len(added) < 2:
        return "By handle: one round."
    low, _, high = quantiles(added, n=4)
    return (
        f"By handle, half of the {len(added)} paired rounds add between {low:.1f} and {high:.1f} "
        f"%, all of them between {min(added):.1f} and {max(added):.1f} %."
    )


ROWS: Final = [Row("plugin_overhead", measure)]
