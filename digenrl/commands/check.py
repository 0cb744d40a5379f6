"""`digenrl check`: what a model is, what it needs, and whether it computes the same as its diffusers pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from digenrl.commands.support.model_memory import Device, MemoryNeeds, memory_needs, this_device, weight_bytes
from digenrl.commands.support.model_probe import TokenizedProbe, compare_with_diffusers, tokenize
from digenrl.config.reading import ConfigError, nearest
from digenrl.config.recipes.files import read_recipe, recipe_for_model, shipped_recipes
from digenrl.config.recipes.overrides import read_overrides
from digenrl.config.recipes.paths import FILE_ENDINGS, is_made_here
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.family import Family
from digenrl.models.loading.sources import ModelSource, fetch_index, local_files, open_pipeline, remote_files
from digenrl.models.loading.weight_files import components, folder_listing, pipeline_files, read_header
from digenrl.models.registry import FAMILIES, find_family
from digenrl.prompts.checks import check_prompts
from digenrl.prompts.source_images import decode_images
from digenrl.rewards.packages import check_packages
from digenrl.run_folder.grids import write_png
from digenrl.telemetry.writing import check_is_no_input, check_new_file
from digenrl.worker.blueprint import (
    Blueprint,
    check_hub_model,
    dtype_of,
    load_whole_model,
    read_blueprint,
    source_of,
)
from digenrl.worker.checks.experts import check_experts
from digenrl.worker.checks.sources import check_sources
from digenrl.worker.pictures import as_image

SMALL_VIDEO_FRAMES = 9  # of two latent frames in every family
STAGES = 3
MOST_DECODED = 10_000  # images of prompts: minutes; of the others, the headers are read
# A model alone is checked as the model of this recipe: adapters of rank 32, small samples.
MODEL_ALONE: dict[str, Any] = {
    "steps": 1,
    "prompts": {"path": "prompts.txt"},
    "rewards": "jpeg_compressibility",
    "sample": {"height": 256, "width": 256},
    "batch": {"prompts": 2, "samples_per_prompt": 2},
    "algorithm": {"name": "flow_grpo"},
    "training": {"lora": {"rank": 32}},
}

Report = Callable[[int, int, str], None]  # stages done, stages in all, what is being done


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What to check, besides the model. `picture` is the file for the decoded sample."""

    probe: str
    download: bool
    denoising_steps: int
    seed: int
    device: str
    picture: Path
    force: bool = True  # whether the picture may replace a file


@dataclass(frozen=True, slots=True)
class Files:
    """The files that loading the model needs: on this machine, or to be downloaded from the hub."""

    on_this_machine: bool
    sizes: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class Sampled:
    """The probe's sample: the largest difference of its latents from diffusers', and where its picture is."""

    probe: TokenizedProbe
    max_difference: float
    picture: Path


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The result of a check. `sampled` is None if `skipped` says why the model was not loaded.

    `images` is how many images of prompts were decoded.
    """

    source: ModelSource
    family: Family
    recipe: Recipe
    components: dict[str, str]
    files: Files
    device: Device
    memory: MemoryNeeds
    images: int = 0
    sampled: Sampled | None = None
    skipped: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the device can do everything that the recipe needs, one thing at a time."""
        return self.memory.largest <= self.device.bytes

    def as_dict(self, request: CheckRequest) -> dict[str, Any]:
        """The content as plain JSON values."""
        sampled = self.sampled
        return {
            "source": str(self.source),
            "kind": "random" if self.recipe.model.random else self.source.kind,
            "base_source": self.source.base,
            "revision": self.source.revision,
            "family": self.family.name,
            "tasks": list(self.family.tasks),
            "pipeline": self.family.pipeline_class.__name__,
            "components": self.components,
            "files": self.files.sizes,
            "bytes_on_disk": self.files.bytes,
            "bytes_to_download": 0 if self.files.on_this_machine else self.files.bytes,
            "probe": {"text": request.probe, "token_ids": {}}
            if sampled is None
            else {"text": request.probe, "token_ids": sampled.probe.token_ids, "tokens": sampled.probe.tokens},
            "images_decoded": self.images,
            "dtype": self.recipe.model.dtype,
            "height": self.recipe.sample.height,
            "width": self.recipe.sample.width,
            "frames": self.recipe.sample.frames,
            "denoising_steps": request.denoising_steps,
            "max_difference": None if sampled is None else sampled.max_difference,
            "picture": None if sampled is None else str(sampled.picture),
            "memory": asdict(self.memory),
            "bytes_needed": self.memory.largest,
            "device": self.device.name,
            "bytes_available": self.device.bytes,
            "fits": self.fits,
            "skipped": self.skipped,
        }


def check_model(where: str, overrides: Sequence[str], request: CheckRequest, report: Report) -> ModelCheck:
    """Checks a recipe's model, or the model of a source; raises ConfigError for what does not work.

    Nothing large is downloaded unless the request says so.
    """
    if not request.probe.strip():
        raise ConfigError("--probe: an empty text; describe a sample")
    _check_picture(request, where)
    this_device(request.device)
    report(0, STAGES, "reading the description")
    recipe, alone = _read_target(where, overrides)
    device = this_device(request.device, recipe.lanes.memory_gib)
    blueprint = read_blueprint(recipe)
    images = 0 if alone else _check_images(blueprint, report)
    check_experts(blueprint, check_hub_model(blueprint))
    check = replace(_described(recipe, alone, blueprint, device), images=images)
    if recipe.model.random:
        return replace(check, skipped="the weights are random: there are no text encoders and nothing to compare")
    if not check.files.on_this_machine and not request.download:
        return replace(check, skipped="not downloaded; to go on, add --download")
    report(1, STAGES, "loading" if check.files.on_this_machine else "downloading and loading")
    folder = open_pipeline(blueprint.family.pipeline_class, check.source, _left_out(check.source))
    needed = _bytes_in_memory(blueprint, check, folder)
    enough = next((each for each in (device, this_device("cpu")) if needed <= each.bytes), None)
    if enough is None:
        return replace(check, skipped=f"too large to load in {blueprint.recipe.model.dtype} on {device.name}")
    return replace(check, sampled=_sample(blueprint, enough, request, report))


def show_check(console: Console, check: ModelCheck, request: CheckRequest) -> None:
    """Prints the result as a table, and what to do next."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(check, request):
        table.add_row(name, Text(text, overflow="fold"))
    console.print(table)


def _rows(check: ModelCheck, request: CheckRequest) -> Iterator[tuple[str, str]]:
    family, model, sample = check.family, check.recipe.model, check.recipe.sample
    base = f", other components from {check.source.base}" if check.source.base else ""
    yield "source", f"{check.source}{base}"
    yield "family", f"{family.name} ({family.pipeline_class.__name__}), {' or '.join(family.tasks)}"
    if check.files.sizes:
        where = "on this machine" if check.files.on_this_machine else "to download"
        yield "files", f"{len(check.files.sizes)} files, {_size(check.files.bytes)}, {where}"
    if check.images:
        yield "images", f"{check.images} of the prompts can be decoded"
    if check.sampled is not None:
        for name, tokens in check.sampled.probe.tokens.items():
            yield name, f"{len(tokens)} tokens: {'|'.join(tokens)}"
        size = f"{sample.height}x{sample.width}" + (f", {sample.frames} frames" if sample.frames > 1 else "")
        how = f"{request.denoising_steps} steps, {size}, {model.dtype}"
        yield "diffusers", f"{_difference(check.sampled.max_difference)} ({how})"
        yield "picture", str(check.sampled.picture)
    needs = check.memory
    parts = f"encode {_size(needs.encode)}, generate {_size(needs.generate)}, train {_size(needs.train)}"
    yield "memory", f"{parts}; one sample at a time, gradient checkpointing"
    yield check.device.torch_name, f"{_size(check.device.bytes)}, {'fits' if check.fits else 'does not fit'}"
    if check.skipped is not None:
        yield "not loaded", check.skipped


def _check_picture(request: CheckRequest, where: str) -> None:
    path = request.picture
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--out: {path}: the picture is written as PNG; name a file that ends in .png")
    check_is_no_input(path, [Path(where)], "--out")
    check_new_file(path, request.force)


def _read_target(where: str, overrides: Sequence[str]) -> tuple[Recipe, bool]:
    """What is checked: a recipe, or a model alone, as part of MODEL_ALONE."""
    if where in shipped_recipes() or where.endswith(FILE_ENDINGS):
        recipe = read_recipe(where, overrides, without_prompts=True)
        check_prompts(recipe, may_be_absent=True)
        check_packages(recipe)
        return recipe, False
    if where.isidentifier() and not Path(where).exists() and not is_made_here(where):
        raise ConfigError(f"{where}: neither a folder nor a recipe; {nearest(where, list(shipped_recipes()))}")
    given = {key for override in read_overrides(overrides) for key in override.keys_set()}
    content = {**MODEL_ALONE, "model": {"family": "", "source": _from_here(where)}}
    recipe = recipe_for_model(content, overrides, where)
    if "model.family" not in given:
        recipe = _changed(recipe, "model", family=_family_of(recipe))
    if find_family(recipe.model.family).kind == "video" and "sample.frames" not in given:
        recipe = _changed(recipe, "sample", frames=SMALL_VIDEO_FRAMES)
    return recipe, True


def _check_images(blueprint: Blueprint, report: Report) -> int:
    """Decodes the images that prompts name; returns how many. Raises ConfigError with the line of a bad one."""
    prompts = check_sources(blueprint, may_be_absent=True)
    return decode_images(prompts, MOST_DECODED, lambda done, count: report(done, count, "decoding images"))


def _from_here(where: str) -> str:
    path = Path(where).expanduser()
    return str(path.absolute()) if path.exists() or where.startswith((".", "~")) else where


def _family_of(recipe: Recipe) -> str:
    """The family of a model that is given alone, by the class of its pipeline."""
    source = source_of(recipe)
    if source.file is not None and source.base is None:
        raise ConfigError(f"{source}: the family of a single file must be given, as model.family=flux")
    found = fetch_index(source)[0]["_class_name"]
    for family in FAMILIES.values():
        if family.pipeline_class.__name__ == found:
            return family.name
    known = ", ".join(f"{each.name} ({each.pipeline_class.__name__})" for each in FAMILIES.values())
    raise ConfigError(f"{source}: holds a {found}, which no family takes; known: {known}")


def _described(recipe: Recipe, alone: bool, blueprint: Blueprint, device: Device) -> ModelCheck:
    family = blueprint.family
    if recipe.model.random:
        source, parts, files, folder = source_of(recipe), {}, Files(True, {}), None
    else:
        source = family.with_base(source_of(recipe))
        index, folder = fetch_index(source)
        parts = {name: kind for name, (_, kind) in components(index).items()}
        files = _files(family, source, index)
        if not files.on_this_machine:
            for name in (family.denoiser, "vae"):
                source.pipeline.repository.fetch(f"{source.pipeline.within}{name}/config.json")
    # A model alone would be trained in bfloat16; float32 is for the comparison.
    trained = _changed(recipe, "model", dtype="bfloat16") if alone else recipe
    encoders = weight_bytes(files.sizes, family.model_class.text_encoders)
    needs = memory_needs(trained, folder, encoders)
    return ModelCheck(source, family, recipe, parts, files, device, needs)


def _files(family: Family, source: ModelSource, index: Mapping[str, Any]) -> Files:
    own = {} if source.file is None else {str(source.file): source.file.stat().st_size}
    folder = local_files(family.pipeline_class, source, _left_out(source))
    if folder is None:
        return Files(False, remote_files(source, _left_out(source)) | own)
    listing = folder_listing(folder)
    return Files(True, pipeline_files(source, index, listing, source.variant, _left_out(source)) | own)


def _left_out(source: ModelSource) -> tuple[str, ...]:
    """The components whose weights do not come from the pipeline."""
    return () if source.file is None else ("transformer",)


def _bytes_in_memory(blueprint: Blueprint, check: ModelCheck, folder: Path) -> int:
    """The size of all weights in the recipe's dtype."""
    within = check.source.pipeline.within if check.source.pipeline.kind == "hub" else ""
    weights = [folder / name.removeprefix(within) for name in check.files.sizes if name.endswith(".safetensors")]
    elements = sum(tensor.elements for path in weights for tensor in read_header(path).values())
    return elements * dtype_of(blueprint.recipe).itemsize


def _sample(blueprint: Blueprint, device: Device, request: CheckRequest, report: Report) -> Sampled:
    model = load_whole_model(blueprint, device.torch_name)
    report(2, STAGES, "sampling")
    tokenized = tokenize(model, request.probe)
    comparison = compare_with_diffusers(blueprint, model, request.probe, request.denoising_steps, request.seed)
    if not (math.isfinite(comparison.max_difference) and comparison.pixels_FCHW.isfinite().all()):
        raise ConfigError(
            f"{blueprint.recipe.model.source}: the sample has values that are not finite; its weights are "
            f"damaged, or {blueprint.recipe.model.dtype} is too coarse for them (model.dtype)"
        )
    write_png(as_image(comparison.pixels_FCHW), request.picture)
    report(STAGES, STAGES, "")
    return Sampled(tokenized, comparison.max_difference, request.picture)


def _changed(recipe: Recipe, section: str, **values: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def _difference(largest: float) -> str:
    return "the same latents, to the bit" if largest == 0 else f"latents differ by at most {largest:.3g}"


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
