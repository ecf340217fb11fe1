"""What runs in the containers of ``docker-compose.yml``: ``python -m simulation.containers``.

The same parts as on one machine, each started by its own command. Ranks and the environment stay
alive when their work is done: a container that ends would end them all. That the work is done
shows in a file of the container's own, which its health check looks for.
"""

import asyncio
import json
import signal
from pathlib import Path
from typing import Annotated, Final, get_args

import typer
import uvicorn
from rich.console import Console

from sideband import RankKeys
from simulation.comparison import Checks
from simulation.engine.app import build_app
from simulation.engine.settings import EngineSettings, Role
from simulation.environment import Environment, http_client
from simulation.expected import expected_samples
from simulation.live import LiveRun
from simulation.models import load_shape
from simulation.plan import Scenario, make_plan
from simulation.rank import DONE_SUFFIX, RankSettings, run_rank
from simulation.sample_check import check_ranks
from simulation.strays import emptied
from simulation.tables import print_checks
from simulation.truth import Truth

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
ENVIRONMENT_DONE: Final = f"environment{DONE_SUFFIX}"

Model = Annotated[str, typer.Option(help="Name of a simulated model, or a config.json.")]
Seed = Annotated[int, typer.Option(help="Decides every token, row and mask.")]
Groups = Annotated[int, typer.Option(min=1, help="Groups of four rollouts.")]
Root = Annotated[Path, typer.Option(help="Where the payload root is mounted here.")]
Results = Annotated[Path, typer.Option(help="Where ranks and environment leave what they got.")]
DoneFile = Annotated[Path, typer.Option(help="Made when the work is done.")]
SeqLen = Annotated[int, typer.Option(min=1, help="Tokens of a packed row.")]


@app.command()
def engine(
    name: Annotated[str, typer.Option(help="Its name.")],
    role: Annotated[str, typer.Option(help="colocated, prefill or decode.")],
    payload_root: Root,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port.")] = 8000,
    model: Model = "sim-uint8",
    seed: Seed = 0,
) -> None:
    """A simulated engine that preempts, disobeys, and dies of a wrong first row."""
    roles: dict[str, Role] = {known: known for known in get_args(Role)}
    if role not in roles:
        raise typer.BadParameter(f"role must be one of {', '.join(roles)}")
    settings = EngineSettings(
        name=name,
        role=roles[role],
        model=model,
        seed=seed,
        host=host,
        port=port,
        payload_root=payload_root,
        preemption_rate=0.2,
        disobedience_rate=0.3,
        is_fragile=True,
        token_latency_s=0.002,
    )
    uvicorn.run(build_app(settings), host=host, port=port, log_level="warning", access_log=False)


@app.command()
def rank(
    endpoint: Annotated[str, typer.Option(help="ZMQ address of the feed.")],
    dp_rank: Annotated[int, typer.Option(min=0, help="Data rank.")],
    cp_rank: Annotated[int, typer.Option(min=0, help="Context-parallel rank.")],
    global_rank: Annotated[int, typer.Option(min=0, help="Number of this process.")],
    payload_root: Root,
    results: Results,
    done_file: DoneFile,
    run_id: Annotated[str, typer.Option(help="The run.")] = "simulation",
    model: Model = "sim-uint8",
    keys: Annotated[
        Path | None, typer.Option(help="Folder that `sideband keys` has filled.")
    ] = None,
) -> None:
    """One trainer rank: keeps what it got, commits, and stays."""
    settings = RankSettings(
        endpoint=endpoint,
        dp_rank=dp_rank,
        cp_rank=cp_rank,
        global_rank=global_rank,
        payload_root=payload_root,
        run_id=run_id,
        model=load_shape(model),
        out=results,
        step_timeout_s=600.0,
        keys=None
        if keys is None
        else RankKeys(feed_key=keys / "feed.key", rank_key=keys / "rank.key_secret"),
    )
    run_rank(settings)
    _stay(done_file)


@app.command()
def environment(
    proxy_url: Annotated[str, typer.Option(help="Base URL of the proxy.")],
    orchestrator_url: Annotated[str, typer.Option(help="Base URL of the orchestrator.")],
    feed_url: Annotated[str, typer.Option(help="Base URL of the feed.")],
    engine_url: Annotated[list[str], typer.Option(help="NAME=URL of an engine, for weights.")],
    token: Annotated[str, typer.Option(envvar="SIDEBAND_TOKEN", help="Of all three services.")],
    results: Results,
    done_file: DoneFile,
    model: Model = "sim-uint8",
    seed: Seed = 0,
    groups: Groups = 6,
) -> None:
    """Roll out, update weights as steps are committed, end the run, and stay."""

    async def work() -> None:
        headers = {"authorization": f"Bearer {token}"}
        async with http_client() as client:
            live = LiveRun(
                client=client,
                proxy_url=proxy_url,
                orchestrator_url=orchestrator_url,
                feed_url=feed_url,
                engine_urls=dict(_named(one) for one in engine_url),
                headers=headers,
            )
            rollouts = Environment(
                client=client,
                proxy_url=proxy_url,
                orchestrator_url=orchestrator_url,
                vocab_size=load_shape(model).vocab_size,
                headers=headers,
                evaluates=True,
            )
            await live.run(rollouts, make_plan(Scenario(seed=seed, groups=groups)))
            facts = {
                "turns": rollouts.traffic.turns,
                "steps_applied": live.applied,
                "evaluations": rollouts.traffic.evaluations,
                "evaluations_wrong": rollouts.traffic.evaluations_wrong,
            }
            (results / ENVIRONMENT_DONE).write_text(json.dumps(facts))

    asyncio.run(work())
    _stay(done_file)


def _named(engine_url: str) -> tuple[str, str]:
    name, separator, url = engine_url.partition("=")
    if not separator:
        raise typer.BadParameter(f"{engine_url} must be NAME=URL, with the proxy's name of it")
    return name, url


@app.command()
def checker(
    payload_root: Root,
    results: Results,
    cp_size: Annotated[int, typer.Option(min=1, help="Context-parallel ranks.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Rank processes.")] = 4,
    seq_len: SeqLen = 512,
    model: Model = "sim-uint8",
    seed: Seed = 0,
    groups: Groups = 6,
) -> None:
    """Compare what the ranks got with the seeded truth; exit status 1 when anything differs."""
    checks = Checks()
    truth = Truth(load_shape(model), seed=seed)
    plans = make_plan(Scenario(seed=seed, groups=groups))
    facts = json.loads((results / ENVIRONMENT_DONE).read_text())
    steps = int(facts["steps_applied"])
    few = [] if steps > 1 else [f"only {steps}"]
    checks.of("steps trained, their weights applied").add(*few, compared=max(1, steps))
    wrong = [f"{facts['evaluations_wrong']} requests"] if facts["evaluations_wrong"] else []
    inline = checks.of("eval requests stay inline beside training by handle")
    inline.add(*wrong, compared=int(facts["evaluations"]))
    done = sorted(results.glob(f"rank*{DONE_SUFFIX}"))
    missing = [] if len(done) == ranks else [f"{len(done)} of {ranks} ranks"]
    checks.of("every rank saw the end").add(*missing, compared=len(done))
    expected = expected_samples(plans, truth, seq_len=seq_len)
    check_ranks(
        checks,
        results,
        expected,
        cp_size=cp_size,
        label=f"CP {cp_size}, P/D by handle",
        weight_version_max=steps,
    )
    left = asyncio.run(emptied(payload_root))
    checks.of("files left after the run: none").add(*(str(path) for path in left))
    print_checks(Console(width=100), checks)
    raise typer.Exit(0 if checks.is_good else 1)


def _stay(done_file: Path) -> None:
    """Say that the work is done, and wait until told to end."""
    done_file.touch()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    app()
