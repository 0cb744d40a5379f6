"""The command line: parses arguments and calls the commands. User errors are one line and exit code 2.

Commands import what they use themselves, so that help does not wait for it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml

from digenrl import __version__
from digenrl.commands.support import options
from digenrl.commands.support.examples import GroupWithExamples
from digenrl.commands.support.output import err, out, print_written, progress_bar
from digenrl.config.import_paths import add_to_python_path
from digenrl.config.limits import SIMULATED_SEARCH_BUDGET
from digenrl.config.reading import ConfigError
from digenrl.config.token_variables import REWARD_TOKEN
from digenrl.runs.stopping import RunFailedError
from digenrl.telemetry.writing import NO_SPACE, check_is_no_input, check_new_yaml, write_atomically

app = typer.Typer(
    name="digenrl",
    cls=GroupWithExamples,
    help="RL post-training for diffusion image and video models.",
    epilog="To start, run 'digenrl train demo': it needs no GPU and downloads no model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
reward_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Serve rewards to training runs.")
app.add_typer(reward_app, name="reward")
PROFILE = Path("profile.yaml")
CHECK_PICTURE = Path("check.png")
CLUSTER = Path("cluster.yaml")
PROBE = 'A cat walks on the grass, next to a sign that says "Café №7"'
INTERRUPTED = 130  # the exit code of a run that saved and stopped, as of any program ended by Ctrl-C


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """RL post-training for diffusion image and video models."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command("train")
def train_command(
    recipe: options.OptionalRecipe = None,
    overrides: options.Overrides = None,
    out_folder: options.RunFolderPath = None,
    resume: options.ResumePath = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="With --resume: start over from step 0, checkpoints are set aside.")
    ] = False,
    plan_file: options.ChosenPlan = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every step as a line of JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also log debug messages to RUN/logs.")] = False,
) -> None:
    """Train a model with a recipe.

    Generating, scoring, training and publishing run concurrently on separate lanes.
    """
    from digenrl.config.plan_files import with_plan

    with _requires("train"):
        from digenrl.commands.train import resume_run, start_run

    overrides = [*(overrides or []), *(["logging.verbose=true"] if verbose else [])]
    if resume is not None:
        if out_folder is not None:
            raise ConfigError("--out: a run is resumed in its own folder; leave it out")
        if plan_file is not None:
            raise ConfigError("--plan: a run is resumed with its own plan; give changes as key=value")
        if recipe is not None and "=" not in recipe:
            raise ConfigError(
                f"{recipe}: a run is resumed with its own recipe, {resume}/config.yaml; leave it out"
            )
        status = resume_run(resume, _words(recipe, overrides), out, as_json, restart)
    elif restart:
        raise ConfigError("--restart: starts an existing run over; name it with --resume RUN")
    elif recipe is None:
        from digenrl.config.recipes.files import shipped_recipes

        raise ConfigError(
            "train: give a recipe, such as 'digenrl train demo', or --resume RUN; shipped recipes: "
            + ", ".join(shipped_recipes())
        )
    else:
        changes = overrides if plan_file is None else with_plan(recipe, overrides, plan_file)
        status = start_run(recipe, changes, out_folder, out, as_json)
    if status == "interrupted":
        raise typer.Exit(INTERRUPTED)


@app.command("check")
def check_command(
    target: options.CheckTarget,
    overrides: options.Overrides = None,
    probe: options.ProbeText = PROBE,
    download: options.Download = False,
    steps: options.ProbeSteps = 4,
    seed: options.ProbeSeed = 0,
    out_file: options.PictureFile = None,
    force: options.Force = False,
    device: options.DeviceName = None,
    as_json: options.AsJson = False,
) -> None:
    """Check a model before training.

    Names its family and task, and what it would download; with the files here, compares it with diffusers.
    """
    with _requires("train"):
        from digenrl.commands.check import CheckRequest, check_model, show_check
        from digenrl.commands.sample import find_device
    picture, may_replace = out_file or CHECK_PICTURE, force or out_file is None
    request = CheckRequest(probe, download, steps, seed, find_device(device), picture, may_replace)
    with progress_bar("checking", hidden=as_json) as report:
        check = check_model(target, overrides or [], request, report)
    if as_json:
        typer.echo(json.dumps(check.as_dict(request)))
    else:
        show_check(out, check, request)


@app.command("report")
def report_command(
    run: options.RunPath, out_folder: options.ReportFolder = None, as_json: options.AsJson = False
) -> None:
    """Write the report of a run and summarize it."""
    from digenrl.commands.report import report_run, summary_table

    report = report_run(run, out_folder)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
        return
    out.print(summary_table(report.summary))
    print_written(report.page, report.trace)


@app.command("sample")
def sample_command(
    run: options.RunPath,
    checkpoint: options.CheckpointName = None,
    prompt: options.PromptTexts = None,
    prompts: options.PromptFile = None,
    image: options.ImageFiles = None,
    count: options.SampleCount = None,
    steps: options.DenoisingSteps = None,
    guidance: options.GuidanceScale = None,
    seed: options.NoiseSeed = None,
    out_folder: options.SampleFolder = None,
    device: options.DeviceName = None,
    as_json: options.AsJson = False,
) -> None:
    """Generate samples from a checkpoint.

    By default those of the run's evaluation, with the same noise.
    """
    if prompt and prompts is not None:
        raise ConfigError("--prompt and --prompts: give texts or a file, not both")
    if image and not prompt:
        raise ConfigError("--image: is for texts given with --prompt; in a file, prompts have a column `image`")
    if guidance is not None and not math.isfinite(guidance):
        raise ConfigError(f"--guidance: expected a finite number, got {guidance}")
    with _requires("train"):
        from digenrl.commands.sample import SampleRequest, print_samples, sample_run
    texts = prompts if prompts is not None else tuple(prompt or ())
    request = SampleRequest(checkpoint, texts, tuple(image or ()), count, steps, guidance, seed, device)
    with progress_bar("sampling", hidden=as_json) as report:
        samples = sample_run(run, request, out_folder, report)
    if as_json:
        typer.echo(json.dumps(samples.as_dict()))
    else:
        print_samples(samples)


@app.command("export")
def export_command(
    run: options.RunPath,
    to: options.ExportFormat,
    checkpoint: options.ExportedCheckpoint = None,
    out_folder: options.ExportFolder = None,
    as_json: options.AsJson = False,
) -> None:
    """Write trained weights for other programs.

    Adapters for diffusers, ComfyUI or peft, or a whole pipeline with merged weights.
    """
    with _requires("train"):
        from digenrl.commands.export import export_run, print_export
    exported = export_run(run, to, checkpoint, out_folder)
    if as_json:
        typer.echo(json.dumps(asdict(exported)))
    else:
        print_export(exported)


@app.command("prompts")
def prompts_command(
    name: options.PromptSetName = None,
    count: options.PromptCount = None,
    split: options.PromptSplit = None,
    seed: options.PromptSeed = None,
    out_file: options.PromptOutput = None,
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every prompt as a line of JSON.")] = False,
) -> None:
    """List the prompt sets, or the prompts of one.

    A recipe uses a set with prompts.name=NAME.
    """
    from digenrl.commands import prompts as command

    if name is None:
        of_a_set = {
            "--count": count,
            "--split": split,
            "--seed": seed,
            "--out": out_file,
            "--force": force or None,
        }
        given = [option for option, value in of_a_set.items() if value is not None]
        if given:
            raise ConfigError(
                f"{given[0]}: give the name of a prompt set: 'digenrl prompts ocr_signs {given[0]} ...'"
            )
        if as_json:
            typer.echo(json.dumps(command.sets_as_json()))
        else:
            out.print(command.sets_table())
        return
    if force and out_file is None:
        raise ConfigError("--force: only --out writes a file; add --out FILE, or leave it out")
    split, seed = split or "train", seed or 0
    if out_file is not None:
        if as_json:
            raise ConfigError("--json: prints the prompts, but --out writes them to a file; leave one of them out")
        command.check_file(out_file, force)
        command.write_prompts(command.draw_prompts(name, split, count, seed), out_file)
        print_written(out_file)
        return
    for prompt in command.draw_prompts(name, split, count or command.PRINTED, seed):
        typer.echo(prompt.as_json_line() if as_json else prompt.text)


@app.command("make-tiny")
def make_tiny_command(
    family: options.FamilyName, directory: options.PipelineFolder, seed: options.WeightsSeed = 0
) -> None:
    """Write a tiny pipeline with random weights.

    It is a complete diffusers pipeline, for trying things out offline.
    """
    with _requires("train"):
        from digenrl.testing.tiny_models import make_tiny_pipeline
    make_tiny_pipeline(family, directory, seed)
    print_written(directory)


@app.command("plan")
def plan_command(
    cluster: options.ClusterFile,
    recipe: options.OptionalRecipe = None,
    overrides: options.PlanOverrides = None,
    model: options.ModelName = None,
    as_json: options.AsJson = False,
    out_file: options.PlanFile = None,
    spec_file: options.PlanSpecFile = None,
    force: options.Force = False,
    on_policy: options.OnPolicy = False,
    stale_shares: options.StaleShares = None,
    ranks: options.TrainerRanks = None,
    objective: options.ObjectiveName = "throughput",
    keep: options.KeptPlans = 5,
) -> None:
    """Plan the use of a cluster.

    Chooses which cards generate and which train a recipe, and how.
    """
    from digenrl.commands import plan
    from digenrl.planning.facts.cluster import files_of_cluster

    words = _words(recipe, overrides)
    request = plan.read_request(words, model)
    shares = plan.stale_shares(request, on_policy, stale_shares)
    settings = plan.plan_options(shares, ranks, objective, keep)
    cards = plan.read_cards(cluster, request)
    plan.check_search(request, cards, settings)
    inputs = [*files_of_cluster(cluster), *map(Path, words[:1])]
    files = plan.output_files(request, out_file, spec_file, force, inputs)
    with progress_bar("planning", hidden=as_json) as report:
        result = plan.search_plans(request, cards, settings, report)
    content = plan.write_plan(request, result, files, words)
    if as_json:
        typer.echo(json.dumps(content))
    else:
        plan.show_plans(out, result, words, files, content.get("overlay"))


@app.command("simulate")
def simulate_command(
    spec_file: options.SpecFile = None,
    profile: options.ProfileName = None,
    as_json: options.AsJson = False,
    trace: options.TraceFile = None,
    gantt: options.GanttFile = None,
    force: options.Force = False,
    ladder: options.Ladder = False,
    unpacked: options.Unpacked = None,
    budget: options.SearchBudget = None,
    chaos: options.ChaosSeeds = None,
    first_seed: options.FirstSeed = 0,
    faults: options.FaultKinds = None,
    large: options.LargeWorlds = False,
    only: options.OnlyFaults = None,
) -> None:
    """Simulate a schedule, or faults.

    Runs a SPEC through the production scheduler on a virtual clock. With --chaos, runs scheduler and driver in
    small random worlds in which workers, messages and machines fail.
    """
    if chaos is not None:
        from digenrl.commands.chaos import read_campaign, run_chaos

        if (
            ladder
            or force
            or any(each is not None for each in (spec_file, profile, trace, gantt, unpacked, budget))
        ):
            raise ConfigError(
                "--chaos: draws its own worlds, and writes no trace; leave out the SPEC, --profile, --trace, "
                "--gantt, --force, --ladder, --unpacked and --budget"
            )
        run_chaos(read_campaign(chaos, first_seed, large, faults, only), as_json)
        return
    if first_seed or faults is not None or large or only is not None:
        raise ConfigError("--first-seed, --faults, --large, --only: only --chaos uses them; add --chaos SEEDS")
    from digenrl.commands.simulate import TraceFiles, compare_techniques, predict_device, simulate_spec
    from digenrl.config.spec import files_of_spec, read_spec

    files = TraceFiles(trace, gantt)
    files.check(ladder, files_of_spec(spec_file, profile), force)
    if force and trace is None and gantt is None:
        raise ConfigError("--force: only --trace and --gantt write files; leave it out")
    if unpacked is not None and not ladder:
        raise ConfigError("--unpacked: only --ladder uses it; add --ladder or leave it out")
    if spec_file is not None:
        spec, nodes = read_spec(spec_file, profile), budget or SIMULATED_SEARCH_BUDGET
        if ladder:
            compare_techniques(spec, unpacked, nodes, as_json)
        else:
            simulate_spec(spec, nodes, files, as_json)
    elif profile is not None and not ladder:
        if budget is not None:
            raise ConfigError("--budget: one device has no help decisions; give a SPEC, or leave it out")
        predict_device(profile, files, as_json)
    else:
        raise ConfigError("simulate: give a SPEC: 'digenrl simulate spec.yaml', or --profile PROFILE alone")


@app.command("profile")
def profile_command(
    recipe: options.RecipeName,
    overrides: options.Overrides = None,
    largest_slice: options.LargestSlice = None,
    out_file: options.ProfileFile = PROFILE,
    force: options.Force = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure the costs of a recipe on this device.

    Writes a profile, which simulate and plan can use.
    """
    from digenrl.config.profiles import write_profile
    from digenrl.config.recipes.files import read_recipe

    check_is_no_input(out_file, [Path(recipe)], "--out")
    check_new_yaml(out_file, force)
    settings = read_recipe(recipe, overrides or [], without_prompts=True)
    with _requires("train"):
        from digenrl.commands.profile import profile_recipe, slice_sizes
    from digenrl.simulation.tables import profile_table

    with progress_bar("profiling", hidden=as_json) as report:
        profile = profile_recipe(settings, slice_sizes(settings, largest_slice), report)
    write_atomically(out_file, write_profile(profile))
    if as_json:
        typer.echo(json.dumps(profile.model_dump(mode="json")))
        return
    out.print(profile_table(profile))
    for remark in profile.remarks:
        out.print(f"not measured: {remark}", style="dim", highlight=False)
    out.print(f"wrote {out_file}  (use it with: digenrl simulate --profile {out_file})", soft_wrap=True)


@app.command("probe")
def probe_command(
    out_file: options.ProposedClusterFile = CLUSTER,
    address: options.ClusterAddress = "auto",
    force: options.Force = False,
) -> None:
    """Measure the links of a Ray cluster.

    Sends 4 to 16 MiB between every two machines, and writes a cluster file for plan, with proposed sites.
    """
    from digenrl.commands.probe import probe_cluster, read_address, write_proposal

    settings = read_address(address)
    check_new_yaml(out_file, force)
    probed = probe_cluster(settings, lambda message: err.print(message, highlight=False))
    write_proposal(probed, out_file)
    out.print(probed.summary(), highlight=False)
    out.print(
        f"wrote {out_file}  (correct it, then use it with: digenrl plan RECIPE --cluster {out_file})",
        soft_wrap=True,
    )


@reward_app.command("serve")
def serve_reward_command(
    rewards: options.RewardNames,
    host: options.ListenAddress = "127.0.0.1",
    port: options.ListenPort = 8790,
    token_env: options.TokenVariable = REWARD_TOKEN,
    certificate: options.CertificateFile = None,
    key: options.KeyFile = None,
    environment: options.EnvironmentFolder = None,
    inherit: options.InheritPackages = False,
    rebuild: options.RebuildEnvironment = False,
) -> None:
    """Serve rewards over HTTP.

    Scoring can then run on other machines, or with --env in a separate environment.
    """
    from digenrl.config.rewards.table import parse_rewards

    settings = parse_rewards([_yaml(text) if text.startswith("{") else text for text in rewards])
    whole = next((each.shown_as for each in settings if each.needs_whole_groups), None)
    if whole is not None:
        raise ConfigError(
            f"'{whole}' compares the samples of a group, and a server gets parts of it; use it without a server"
        )
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key: give both, or none of them")
    for option, file in (("--certificate", certificate), ("--key", key)):
        if file is not None and not file.is_file():
            raise ConfigError(f"{option} {file}: no such file")
    if token_env != REWARD_TOKEN and token_env not in os.environ:
        raise ConfigError(f"--token-env {token_env}: there is no such environment variable")
    if environment is not None:
        from digenrl.commands.support.reward_environment import serve_in_environment

        listening = ["--host", host, "--port", str(port), "--token-env", token_env]
        secured = [] if key is None else ["--certificate", str(certificate), "--key", str(key)]
        serve_in_environment(environment, settings, [*rewards, *listening, *secured], inherit, rebuild)
    if inherit or rebuild:
        raise ConfigError("--inherit and --rebuild: only with --env DIR")
    add_to_python_path([Path.cwd()])
    with _requires("train", "serve"):
        from digenrl.rewards.building import build_rewards
        from digenrl.rewards.serving.server import TlsFiles, check_address, serve, token_for
    tls = None if certificate is None or key is None else TlsFiles(certificate, key)
    token = os.environ.get(token_env)
    check_address(host, port)  # these fail before any model is loaded
    token_for(host, token)
    if tls is not None:
        tls.context()
    serve(build_rewards(settings), host, port, token, tls)


def _words(recipe: str | None, overrides: list[str] | None) -> list[str]:
    """All positional arguments: without a recipe, its place is taken by the first override."""
    return [*([recipe] if recipe else []), *(overrides or [])]


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"REWARD: {text!r} is not valid YAML") from None


@contextmanager
def _requires(*extras: str) -> Iterator[None]:
    """Turns a failed import inside into a ConfigError that names the extras to install."""
    # Otherwise transformers prints a message about every optional package that is missing.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"this command needs the package '{error.name}', which is not installed"
        raise ConfigError(f"{missing}; install digenrl[{','.join(extras)}]") from None


def main() -> NoReturn:
    """The entry point. User errors exit with code 2, failed runs with code 1, both with one line on stderr."""
    try:
        app(standalone_mode=True)
    except ConfigError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(2)
    except RunFailedError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        typer.echo(f"digenrl: {error.filename or 'output'}: cannot be written: {error.strerror}", err=True)
        sys.exit(1)
    sys.exit(0)
