"""Arguments and options of the command line, shared by its commands or too long for a signature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from digenrl.config.limits import DRAWN_PROMPTS

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Override settings of the recipe, e.g. training.lora.rank=8."),
]
_RECIPE = typer.Argument(
    metavar="RECIPE", help="The recipe: a YAML file, or the name of a shipped recipe, e.g. demo."
)
RecipeName = Annotated[str, _RECIPE]
OptionalRecipe = Annotated[str | None, _RECIPE]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, e.g. runs/demo-1.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]

# simulate
SpecFile = Annotated[
    Path | None, typer.Argument(metavar="SPEC", help="The schedule to simulate: a YAML or JSON file.")
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        metavar="PROFILE",
        help="A file or a name: supplies times that the SPEC omits; without a SPEC, predicts a run on its device.",
    ),
]
TraceFile = Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")]
GanttFile = Annotated[Path | None, typer.Option(help="Write a Gantt chart (SVG) to this file.")]
Ladder = Annotated[bool, typer.Option("--ladder", help="Compare the techniques, adding them one by one.")]
Unpacked = Annotated[
    str | None,
    typer.Option(metavar="SECONDS", help="With --ladder: seconds per sample without time-step packing."),
]
ChaosSeeds = Annotated[
    int | None,
    typer.Option("--chaos", min=1, metavar="SEEDS", help="Inject random faults into this many simulated runs."),
]
FirstSeed = Annotated[int, typer.Option("--first-seed", min=0, help="With --chaos: the first seed.")]
FaultKinds = Annotated[
    str | None,
    typer.Option("--faults", metavar="KINDS", help="With --chaos: only these kinds of faults, e.g. crash,slow."),
]
LargeWorlds = Annotated[bool, typer.Option("--large", help="With --chaos: 64 lanes and 512 samples per step.")]
OnlyFaults = Annotated[
    str | None,
    typer.Option(
        "--only", metavar="NUMBERS", help="With --chaos: only these faults of a seed, e.g. 0,3, or none."
    ),
]
SearchBudget = Annotated[
    int | None,
    typer.Option(min=1, help="The number of nodes that one help decision may search; 200000 by default."),
]

# plan
ClusterFile = Annotated[
    Path, typer.Option(help="The available cards: a YAML or JSON file, e.g. examples/cluster_small.yaml.")
]
PlanOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Override settings of the recipe, e.g. batch.prompts=8; with --model, e.g. frames=33.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(help="Instead of a recipe: a model with its published settings, e.g. flux.1 or wan2.1-14b."),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the best plan of a recipe here; plan.yaml by default."),
]
PlanSpecFile = Annotated[
    Path | None,
    typer.Option(
        "--spec", metavar="FILE", help="Write the SPEC of the best plan here; with --model, plan.yaml by default."
    ),
]
OnPolicy = Annotated[bool, typer.Option("--on-policy", help="Plan without stale samples.")]
StaleShares = Annotated[
    list[float] | None, typer.Option("--stale-share", help="A stale share to try; may be repeated.")
]
TrainerRanks = Annotated[
    int | None, typer.Option(min=1, help="The number of cards that train; chosen by the planner by default.")
]
ObjectiveName = Annotated[str, typer.Option(help="throughput or cost.")]
KeptPlans = Annotated[
    int, typer.Option(min=1, help="The number of splits to show, besides the best plan of each other kind.")
]

# probe
ProposedClusterFile = Annotated[
    Path, typer.Option("--out", metavar="FILE", help="Write the proposed cluster file here.")
]
ClusterAddress = Annotated[
    str, typer.Option(help="The Ray cluster, e.g. 10.0.0.1:6379; auto: that of this machine.")
]


# check
CheckTarget = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE|RECIPE",
        help="A model: a folder, a hub id or a .safetensors file; or a recipe: a YAML file or a shipped name.",
    ),
]
ProbeText = Annotated[str, typer.Option(metavar="TEXT", help="The prompt that the model is tried with.")]
ProbeSteps = Annotated[int, typer.Option(min=1, help="The number of denoising steps.")]
ProbeSeed = Annotated[int, typer.Option(min=0, help="The seed of the initial noise.")]
Download = Annotated[bool, typer.Option("--download", help="Download a model that is not on this machine.")]
PictureFile = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Write the picture here, as PNG; by default to check.png, which is replaced."
    ),
]

# profile
LargestSlice = Annotated[
    int | None, typer.Option(min=1, help="The largest slice to measure; a whole group by default.")
]
ProfileFile = Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the profile here.")]

# train
RunFolderPath = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The run's new folder; runs/NAME-1, -2, ... by default."),
]
ResumePath = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Resume this run from its newest checkpoint.")
]
ChosenPlan = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Use the lanes, slices and techniques of a plan."),
]

# sample
CheckpointName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A checkpoint, e.g. step_000020, or 'before': the untrained model. By default the newest.",
    ),
]
PromptTexts = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A prompt; may be repeated.")]
ImageFiles = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="A source image of all prompts, for models that edit; may be repeated."),
]
PromptFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts as .txt, .jsonl or .parquet.")]
SampleCount = Annotated[
    int | None, typer.Option(min=1, help="The number of samples; if there are fewer prompts, they repeat.")
]
DenoisingSteps = Annotated[int | None, typer.Option(min=1, help="The number of denoising steps.")]
GuidanceScale = Annotated[float | None, typer.Option(min=0, help="The guidance scale.")]
NoiseSeed = Annotated[int | None, typer.Option(min=0, help="The seed of the initial noise.")]
SampleFolder = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="A new folder; by default a numbered one in RUN/sampled."),
]
DeviceName = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default cuda if available.")]

# export
ExportFormat = Annotated[
    str, typer.Option("--to", metavar="FORMAT", help="diffusers, comfyui, peft, or merged: a whole pipeline.")
]
ExportedCheckpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="NAME", help="A checkpoint, e.g. step_000020. By default the newest."),
]
ExportFolder = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="A new folder; by default a numbered one in RUN/exported."),
]

# report
ReportFolder = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write report.html and trace.json here, not into the run's folder."),
]

# prompts
PromptSetName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="A prompt set, e.g. ocr_signs; without it, all are listed.")
]
PromptCount = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=DRAWN_PROMPTS,
        help="The number of prompts; by default 20, or with --out as many as a recipe uses.",
    ),
]
PromptSplit = Annotated[str | None, typer.Option(help="train, the default, or held_out.")]
PromptSeed = Annotated[int | None, typer.Option(min=0, help="Another seed than 0 gives other prompts.")]
PromptOutput = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write them to a .txt file, or with columns to a .jsonl file."),
]

# make-tiny
FamilyName = Annotated[str, typer.Argument(metavar="FAMILY", help="The model family, e.g. sd3 or wan.")]
PipelineFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the pipeline.")]
WeightsSeed = Annotated[int, typer.Option(min=0, max=2**64 - 1, help="The seed of the random weights.")]

# reward serve
RewardNames = Annotated[
    list[str], typer.Argument(metavar="REWARD", help="A name, package.module:function, or YAML in braces.")
]
ListenAddress = Annotated[
    str, typer.Option(help="The address to listen on; any address other than this machine's needs a token.")
]
ListenPort = Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")]
CertificateFile = Annotated[
    Path | None, typer.Option("--certificate", metavar="FILE", help="Serve HTTPS with this certificate, in PEM.")
]
KeyFile = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="The private key of the certificate, in PEM.")
]
EnvironmentFolder = Annotated[
    Path | None,
    typer.Option(
        "--env", metavar="DIR", help="Serve in this virtual environment; create it if it does not exist."
    ),
]
InheritPackages = Annotated[
    bool,
    typer.Option("--inherit", help="Build it on top of the current environment; install only what is missing."),
]
RebuildEnvironment = Annotated[bool, typer.Option("--rebuild", help="Build the environment again.")]
TokenVariable = Annotated[
    str, typer.Option(help="The environment variable with the token that clients must send.")
]
