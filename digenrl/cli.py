"""The command line: reads, chooses, runs, shows. Mistakes end in one line and exit code 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol, cast, get_args

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from digenrl import __version__
from digenrl.config.plan_files import with_plan
from digenrl.config.profiles import read_profile, write_profile
from digenrl.config.reading import ConfigError, nearest
from digenrl.config.recipe import Recipe
from digenrl.config.recipe_files import read_recipe
from digenrl.config.rewards import parse_rewards
from digenrl.config.spec import read_spec
from digenrl.planning.candidates import Objective, PlanOptions
from digenrl.planning.cluster import read_cluster
from digenrl.planning.command import places_for, search_plans, what_to_plan
from digenrl.planning.overlay import overlay, overlay_text
from digenrl.planning.profiled_work import check_profiles
from digenrl.planning.view import result_as_dict, show_plans, spec_as_dict
from digenrl.planning.workload import WORKLOAD_KEYS
from digenrl.runs.stopping import RunFailedError
from digenrl.simulation.ladder import Rung, climb, rungs
from digenrl.simulation.profile_view import prediction_table, prediction_title, profile_table
from digenrl.simulation.simulator import SIMULATED_SEARCH_BUDGET, simulate
from digenrl.simulation.single_device import predict_single_device
from digenrl.simulation.view import answer_table, ladder_table, title_of
from digenrl.telemetry.gantt_svg import gantt_svg
from digenrl.telemetry.gantt_terminal import gantt_text
from digenrl.telemetry.perfetto import write_perfetto
from digenrl.telemetry.writing import check_writable, write_atomically

if TYPE_CHECKING:  # it brings torch along
    from digenrl.commands.sample import WrittenSamples

app = typer.Typer(
    name="digenrl",
    help="RL post-training for diffusion models on separate pools of cards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
reward_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Rewards apart from training.")
app.add_typer(reward_app, name="reward")
PROFILE = Path("profile.yaml")
INTERRUPTED = 130  # the exit code of a run that saved itself and left, as of any program stopped by Ctrl-C


class ShowProgress(Protocol):
    """What has been done of how much and, where that is worth saying, what is being done."""

    def __call__(self, done: int, total: int, doing: str = "") -> None: ...


out = Console()
aside = Console(stderr=True)  # progress and remarks: never in the way of --json


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """RL post-training for diffusion models on separate pools of cards."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command("simulate")
def simulate_command(
    spec_file: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC]", help="What to schedule: a YAML or JSON file."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="A file or a name: times that the SPEC leaves out; without a SPEC, a run on that one device.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a trace that ui.perfetto.dev opens.")] = None,
    gantt: Annotated[Path | None, typer.Option(help="Write a picture of the lanes (SVG).")] = None,
    ladder: Annotated[bool, typer.Option("--ladder", help="Compare all techniques, one by one.")] = False,
    unpacked: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="With --ladder: seconds per sample without time-step packing."),
    ] = None,
    budget: Annotated[
        int, typer.Option(min=1, help="Nodes that one help decision may look at.")
    ] = SIMULATED_SEARCH_BUDGET,
) -> None:
    """Run a SPEC through the production scheduler on a virtual clock, and show what it costs."""
    for path in (trace, gantt):
        if path is not None:
            check_writable(path)
    if unpacked is not None and not ladder:
        raise ConfigError("--unpacked: only --ladder uses it; add --ladder or leave it out")
    if ladder and (trace is not None or gantt is not None):
        raise ConfigError("--ladder: compares several runs and writes no trace or picture; leave one of them out")
    if spec_file is None:
        if profile is None or ladder:
            raise ConfigError("simulate: give a SPEC, as 'digenrl simulate spec.yaml', or --profile PROFILE alone")
        _foretell_and_show(profile, as_json, trace, gantt)
        return
    spec = read_spec(spec_file, profile)
    if ladder:
        _climb_and_show(rungs(spec, _seconds("--unpacked", unpacked)), as_json)
        return
    run = simulate(spec, budget)
    if trace is not None:
        write_perfetto(run.trace, trace)
    if gantt is not None:
        write_atomically(gantt, gantt_svg(run.trace, title_of(run.spec)))
    if as_json:
        typer.echo(json.dumps(run.answer.as_dict()))
        return
    out.print(answer_table(run.spec, run.answer))
    out.print()
    out.print(gantt_text(run.trace, out.width))
    _say_written(trace, gantt)


def _foretell_and_show(name: str, as_json: bool, trace: Path | None, gantt: Path | None) -> None:
    profile = read_profile(name)
    foretold = predict_single_device(profile, name)
    if trace is not None:
        write_perfetto(foretold.trace, trace)
    if gantt is not None:
        write_atomically(gantt, gantt_svg(foretold.trace, prediction_title(profile, foretold)))
    if as_json:
        typer.echo(json.dumps(foretold.as_dict()))
        return
    out.print(prediction_table(profile, foretold))
    out.print()
    out.print(gantt_text(foretold.trace, out.width))
    _say_written(trace, gantt)


def _climb_and_show(ladder: tuple[Rung, ...], as_json: bool) -> None:
    with _progress("simulating", quiet=as_json) as report:
        climbed = []
        for each in climb(ladder):
            climbed.append(each)
            report(len(climbed), len(ladder))
    if as_json:
        rows = [
            {"rung": each.rung.name, "note": each.rung.note, "answer": each.answer and each.answer.as_dict()}
            for each in climbed
        ]
        typer.echo(json.dumps(rows))
    else:
        out.print(ladder_table(climbed))


@app.command("plan")
def plan_command(
    cluster: Annotated[Path, typer.Option(help="The cards there are: a YAML or JSON file.")],
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="What to train: a YAML file, or the name of a shipped recipe."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help=f"Change the recipe, as batch.prompts=8; with --model: {', '.join(WORKLOAD_KEYS)}.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Without a recipe: a model by its published settings, as flux.1 or wan2.1-14b."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans as JSON.")] = False,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write the best plan of a recipe; plan.yaml."),
    ] = None,
    spec_file: Annotated[
        Path | None,
        typer.Option("--spec", metavar="FILE", help="Where to write its SPEC; with --model plan.yaml."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over existing files.")] = False,
    on_policy: Annotated[bool, typer.Option("--on-policy", help="No stale starts.")] = False,
    stale_share: Annotated[
        list[float] | None, typer.Option(help="A stale share to try; may be given several times.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="So many cards train; as many as pay.")] = None,
    objective: Annotated[str, typer.Option(help="throughput or cost.")] = "throughput",
    keep: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 5,
) -> None:
    """Size the pools for a recipe on a cluster: which cards generate, which train, and how."""
    words = [*([recipe] if recipe else []), *(overrides or [])]
    wanted = what_to_plan(words, model)
    files = places_for(wanted, out_file, spec_file, force)
    own_share = wanted.techniques.tcss if isinstance(wanted, Recipe) else 0.0
    shares = _stale_shares(on_policy, stale_share, own_share)
    options = PlanOptions(stale_shares=shares, ranks=ranks, objective=_objective(objective), keep=keep)
    with _progress("planning", quiet=as_json) as report:
        cards = read_cluster(cluster)
        check_profiles(cards, wanted if isinstance(wanted, Recipe) else None)
        result = search_plans(wanted, cards, options, report)
    content = result_as_dict(result)
    if isinstance(wanted, Recipe) and files.plan is not None:
        content["overlay"] = overlay(result.best, wanted, words[0])
        write_atomically(files.plan, overlay_text(content["overlay"], result.best))
    if files.spec is not None:
        write_atomically(files.spec, yaml.safe_dump(spec_as_dict(result.best), sort_keys=False))
    if as_json:
        typer.echo(json.dumps(content))
    else:
        show_plans(out, result, words, files)


def _yaml_value(where: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"'{where}': the value is not valid YAML") from None


@app.command("profile")
def profile_command(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Whose work: a YAML file, or the name of a shipped recipe.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Change the recipe, as sample.height=512."),
    ] = None,
    largest_slice: Annotated[
        int | None, typer.Option(min=1, help="No larger slices than this; up to a whole group if not given.")
    ] = None,
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write the profile.")] = PROFILE,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure this device at a recipe's work, and write a profile that simulate and plan read."""
    if check_writable(out_file).exists() and not force:
        raise ConfigError(f"{out_file}: exists; add --force to write over it, or name another with --out")
    settings = read_recipe(recipe, overrides or [], without_prompts=True)
    with _needing("train"):
        from digenrl.commands.profile import profile_recipe, slice_sizes
    with _progress("profiling", quiet=as_json) as report:
        profile = profile_recipe(settings, slice_sizes(settings, largest_slice), report)
    write_atomically(out_file, write_profile(profile))
    if as_json:
        typer.echo(json.dumps(profile.model_dump(mode="json")))
        return
    out.print(profile_table(profile))
    for remark in profile.remarks:
        out.print(f"left out: {remark}", style="dim", markup=False, highlight=False)
    out.print(f"wrote {out_file}  (look at it with: digenrl simulate --profile {out_file})", soft_wrap=True)


@app.command("train")
def train_command(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A YAML file, or the name of a shipped recipe."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Change the recipe, as training.lora.rank=8."),
    ] = None,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The run's new folder; runs/NAME-1, -2, ... if not given."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run from its newest checkpoint.")
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Lanes, slices and techniques as digenrl plan chose them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every step as a line of JSON.")] = False,
) -> None:
    """Train a model by a recipe: generate, score, train and publish, on separate lanes at the same time."""
    from digenrl.commands.train import resume_run, start_run

    if resume is not None:
        if out_folder is not None:
            raise ConfigError("--out: a run is resumed in its own folder; leave it out")
        if plan_file is not None:
            raise ConfigError("--plan: a run is resumed with its own; give what is to change as key=value")
        changes = [*([recipe] if recipe else []), *(overrides or [])]
        status = resume_run(resume, changes, out, as_json)
    elif recipe is None:
        raise ConfigError("train: give a recipe, as 'digenrl train demo', or --resume RUN")
    else:
        changes = overrides or [] if plan_file is None else with_plan(recipe, overrides or [], plan_file)
        status = start_run(recipe, changes, out_folder, out, as_json)
    if status == "interrupted":
        raise typer.Exit(INTERRUPTED)


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, as runs/demo-1.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Write a run's report and trace anew, and say how the run went, or goes."""
    from digenrl.commands.report import report_run, summary_table

    reported = report_run(run)
    if as_json:
        typer.echo(json.dumps(reported.as_dict()))
        return
    out.print(summary_table(reported.summary))
    _say_written(reported.page, reported.trace)


@app.command("sample")
def sample_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, as runs/demo-1.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="As step_000020, or 'before': the untrained model. The newest if not given."
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="What to show; may be given several times.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts as .txt, .jsonl or .parquet.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Images in all; prompts repeat if they are fewer.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="The guidance scale.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the noise that images begin with.")] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="A new folder; one in RUN/sampled if not given.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Make pictures from a checkpoint of a run: by default those of its evaluation, with the same noise."""
    if prompt and prompts is not None:
        raise ConfigError("--prompt and --prompts: give texts or a file, not both")
    with _needing("train"):
        from digenrl.commands.sample import SampleRequest, sample_run
    wished = prompts if prompts is not None else tuple(prompt or ())
    request = SampleRequest(checkpoint, wished, count, steps, guidance, seed, device)
    with _progress("sampling", quiet=as_json) as report:
        sampled = sample_run(run, request, out_folder, report)
    if as_json:
        typer.echo(json.dumps(sampled.as_dict()))
        return
    _show_sampled(sampled)


def _show_sampled(sampled: WrittenSamples) -> None:
    out.print(f"{sampled.checkpoint} ({sampled.weights}): {len(sampled.pictures)} samples", highlight=False)
    if not sampled.as_evaluated:
        out.print("These are the exported weights; evaluations use those that generate.", style="dim")
    _say_written(sampled.grid)
    if sampled.loading:
        out.print("The newest weights in diffusers:")
        for line in sampled.loading:
            out.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


@app.command("make-tiny")
def make_tiny_command(
    family: Annotated[str, typer.Argument(help="Model family, as sd3 or wan.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the pipeline.")],
    seed: Annotated[int, typer.Option(min=0, help="Of its random weights.")] = 0,
) -> None:
    """Write a complete tiny diffusers pipeline with random weights, without a network: for trying things out."""
    with _needing("train"):
        from digenrl.testing.tiny_models import make_tiny_pipeline
    make_tiny_pipeline(family, directory, seed)
    out.print(f"wrote {directory}")


@reward_app.command("serve")
def serve_reward_command(
    rewards: Annotated[
        list[str], typer.Argument(metavar="REWARD...", help="A name, package.module:function, or YAML in braces.")
    ],
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than this machine need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8790,
    token_env: Annotated[
        str, typer.Option(help="Environment variable with the token that clients must send.")
    ] = "DIGENRL_REWARD_TOKEN",
) -> None:
    """Serve rewards over HTTP, so that scorers can be on machines of their own."""
    settings = parse_rewards([_yaml_value("REWARD", text) if text.startswith("{") else text for text in rewards])
    with _needing("train", "serve"):
        from digenrl.rewards.building import build_rewards
        from digenrl.rewards.server import serve, token_for
    token = os.environ.get(token_env)
    token_for(host, token)  # complains before any model is loaded
    serve(build_rewards(settings), host, port, token)


@contextmanager
def _needing(*extras: str) -> Iterator[None]:
    """What the imports inside need is installed with these extras."""
    # Without it, transformers prints a remark about every optional package that is not there.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"this needs the package '{error.name}', which is not installed"
        raise ConfigError(f"{missing}; install digenrl[{','.join(extras)}]") from None


def _stale_shares(on_policy: bool, given: list[float] | None, own: float) -> tuple[float, ...]:
    """The shares to try; where none are given, a recipe's own among them."""
    if on_policy and given:
        raise ConfigError("--on-policy and --stale-share: one forbids what the other asks for; leave one out")
    for share in given or ():
        if not 0 <= share <= 1:
            raise ConfigError(f"--stale-share: must be between 0 and 1, got {share}")
    if on_policy:
        return (0.0,)
    return tuple(given) if given else tuple(sorted({*PlanOptions().stale_shares, own}))


def _objective(word: str) -> Objective:
    for known in get_args(Objective):
        if word == known:
            return cast(Objective, known)
    raise ConfigError(f"--objective: unknown '{word}'; {nearest(word, list(get_args(Objective)))}")


def _seconds(option: str, text: str | None) -> Decimal | None:
    if text is None:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ConfigError(f"{option}: expected seconds, got '{text}'") from None
    if not value.is_finite() or value <= 0:
        raise ConfigError(f"{option}: must be above 0, got {text}")
    return value


def _say_written(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            out.print(f"wrote {path}", soft_wrap=True)


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[ShowProgress]:
    """A bar on the side channel, gone when the work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = quiet or not aside.is_terminal
    with Progress(*columns, console=aside, transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, total: int, doing: str = "") -> None:
            progress.update(task, completed=done, total=total, description=f"{what}: {doing}" if doing else what)

        yield show


def main() -> NoReturn:
    """The entry point; whatever a user got wrong is told in one line."""
    try:
        app(standalone_mode=True)
    except ConfigError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(2)
    except RunFailedError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(1)
    sys.exit(0)
