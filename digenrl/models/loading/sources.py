"""Where a model comes from: the folder of a diffusers pipeline, a hub id, or a single .safetensors file.

A single file has the weights of the transformer. All other components come from a base pipeline, which is a folder
or a hub id itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from digenrl.config.reading import ConfigError, read_mapping
from digenrl.models.loading.hub import HubRepository, HubUnreachableError
from digenrl.models.loading.weight_files import (
    INDEX_NAME,
    PICKLES,
    HeaderEntry,
    MissingFilesError,
    folder_listing,
    pipeline_files,
    pipeline_index,
    read_header,
)

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILE = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)/(?P<file>.+\.safetensors)")
SINGLE_FILE = ".safetensors"
RUN_NAME = "run.json"  # in a run's folder
# Before the names of a transformer's tensors, in files that may also hold other components.
PREFIXES = ("model.diffusion_model.", "model.model.", "diffusion_model.", "net.")
QUANTIZED = ("quant_state", "absmax", "comfy_quant", "scaled_fp8", "scale_weight", "weight_scale", "qweight")
EIGHT_BIT = ("F8", "I8", "U8")  # types in the header of a .safetensors file
# Pipelines that another class loads too, if their index has this setting: Wan2.2 5B is published as text-to-video.
ALSO_LOADED_BY = {("WanPipeline", "WanImageToVideoPipeline"): "expand_timesteps"}


class WrongPipelineError(ConfigError):
    """The source holds a pipeline of another class."""

    def __init__(self, where: object, found: str, expected: str) -> None:
        super().__init__(
            f"{where}: holds a {found}, expected a {expected}; name its own family or another directory"
        )
        self.location, self.found, self.expected = str(where), found, expected


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's source. For a single file, all but `location` is about the base pipeline, `base`.

    `token` is `env:NAME`, the environment variable with an access token of the hub.
    """

    location: str
    revision: str | None = None
    variant: str | None = None
    subfolder: str | None = None
    token: str | None = None
    base: str | None = None

    @classmethod
    def of(cls, source: str | Path | ModelSource) -> ModelSource:
        """A source given by its location alone, or as it is."""
        return source if isinstance(source, ModelSource) else cls(str(source))

    def __str__(self) -> str:
        return self.location

    @property
    def kind(self) -> Literal["folder", "file", "hub"]:
        """What the location is; raises ConfigError if it is nothing that exists or could exist on the hub."""
        path = Path(self.location)
        if path.is_dir():
            return "folder"
        if path.is_file() or path.suffix == SINGLE_FILE:
            return "file"
        if HUB_ID.fullmatch(self.location) is None:
            hint = "; for a repository of the hub, write owner/name" if "://" in self.location else ""
            raise ConfigError(f"{self.location}: no such directory, and not a hub id of the form owner/name{hint}")
        return "hub"

    @property
    def file(self) -> Path | None:
        return Path(self.location) if self.kind == "file" else None

    @property
    def pipeline(self) -> ModelSource:
        """The source of the pipeline: the base of a single file, or this source itself."""
        if self.kind != "file":
            return self
        if self.base is None:
            raise ConfigError(
                f"{self.location}: a single file has the transformer only; set model.base_source to a folder or "
                "hub id with the other components"
            )
        base = replace(self, location=self.base, base=None)
        if base.kind == "file":
            raise ConfigError(f"model.base_source: {self.base} is a single file; expected a folder or a hub id")
        return base

    @property
    def repository(self) -> HubRepository:
        return HubRepository(self.location, self.revision, self.token)

    @property
    def within(self) -> str:
        """The subfolder as a prefix of paths."""
        return f"{self.subfolder.strip('/')}/" if self.subfolder else ""


def check_source(pipeline_class: type[Any], source: str | Path | ModelSource) -> None:
    """Raises ConfigError unless the source can be loaded as this class, as far as is known without the network.

    Checked are the class, the presence of all files, and the headers of weight files.
    """
    source = ModelSource.of(source)
    if source.base is not None and source.kind != "file":
        raise ConfigError(
            f"model.base_source: {source.base}, but model.source ({source}) is not a single .safetensors file; "
            "leave it out"
        )
    if source.file is not None:
        check_single_file(source.file)
        if source.base is None:
            return
    pipeline = source.pipeline
    if pipeline.kind == "folder":
        without = () if source.file is None else ("transformer",)
        check_one_transformer(source, check_class(pipeline_class, pipeline))
        folder = Path(pipeline.location, pipeline.within)
        for name in _files_in(folder, pipeline, pipeline_class, without):
            if name.endswith(SINGLE_FILE):
                read_header(folder / name)


def fetch_index(source: ModelSource) -> tuple[dict[str, Any], Path]:
    """The content of the pipeline's model_index.json and its folder, before anything else is downloaded."""
    pipeline = source.pipeline
    name = pipeline.within + INDEX_NAME
    if pipeline.kind == "folder":
        path: Path | None = Path(pipeline.location, name)
    else:
        path = pipeline.repository.cached(name) or pipeline.repository.fetch(name)
    if path is None or not path.is_file():
        hint = ""
        if path is not None and path.with_name(RUN_NAME).is_file():
            hint = f"; it is a run's folder: to get its model, digenrl export {path.parent} --to merged"
        raise ConfigError(f"{_named(pipeline)}: not a diffusers pipeline directory: it has no {INDEX_NAME}{hint}")
    return pipeline_index(path.read_text(encoding="utf-8"), path), path.parent


def local_json(source: ModelSource, name: str) -> dict[str, Any] | None:
    """The content of a .json file of the pipeline, such as transformer/config.json, if it is on this machine."""
    pipeline = source.pipeline
    if pipeline.kind == "folder":
        path: Path | None = Path(pipeline.location, pipeline.within, name)
    else:
        path = pipeline.repository.cached(pipeline.within + name)
    return None if path is None or not path.is_file() else read_mapping(path)


def fetch_json(source: ModelSource, name: str) -> dict[str, Any] | None:
    """Like `local_json`, but the small file of a hub id is downloaded if the hub can be reached."""
    if source.pipeline.kind == "hub" and local_json(source, name) is None:
        with suppress(HubUnreachableError):
            source.pipeline.repository.fetch(source.pipeline.within + name)
    return local_json(source, name)


def check_one_transformer(source: ModelSource, index: Mapping[str, Any]) -> None:
    """Raises ConfigError for a single file whose pipeline has two transformers."""
    if source.file is not None and index.get("boundary_ratio") is not None:
        raise ConfigError(
            f"{source}: a single file, but {source.base} has two transformers; give a folder or hub id with both"
        )


def check_class(pipeline_class: type[Any], source: ModelSource) -> dict[str, Any]:
    """The content of the pipeline's model_index.json; raises ConfigError unless it names this class.

    Of a hub id, nothing else is fetched.
    """
    index, _ = fetch_index(source)
    found, expected = index["_class_name"], pipeline_class.__name__
    setting = ALSO_LOADED_BY.get((found, expected))
    if found != expected and not (setting and index.get(setting)):
        raise WrongPipelineError(_named(source.pipeline), found, expected)
    return index


def local_files(pipeline_class: type[Any], source: ModelSource, without: Sequence[str]) -> Path | None:
    """The folder of the pipeline if all its files are on this machine; None if a hub id must be downloaded."""
    pipeline = source.pipeline
    if pipeline.kind == "folder":
        folder = Path(pipeline.location, pipeline.within)
        _files_in(folder, pipeline, pipeline_class, without)
        return folder
    index = pipeline.repository.cached(pipeline.within + INDEX_NAME)
    if index is None:
        return None
    try:
        _files_in(index.parent, pipeline, pipeline_class, without)
    except MissingFilesError:
        return None
    return index.parent


def weight_files(pipeline_class: type[Any], source: ModelSource) -> dict[str, Path]:
    """The local .safetensors files of a model by their names in the pipeline; a single file is `transformer`."""
    without = () if source.file is None else ("transformer",)
    folder = local_files(pipeline_class, source, without)
    if folder is None:
        return {}
    names = _files_in(folder, source.pipeline, pipeline_class, without)
    files = {name: folder / name for name in names if name.endswith(SINGLE_FILE)}
    return files if source.file is None else files | {"transformer": source.file}


def remote_files(source: ModelSource, without: Sequence[str] = ()) -> dict[str, int]:
    """The files of a hub id that loading it needs, with their sizes, by their paths in the repository."""
    pipeline = source.pipeline
    index, folder = fetch_index(pipeline)
    try:
        in_repository = pipeline.repository.listing()
    except HubUnreachableError:
        _explain_cache(pipeline, index, folder, without)
        raise
    listing = {
        name.removeprefix(pipeline.within): size
        for name, size in in_repository.items()
        if name.startswith(pipeline.within)
    }
    files = pipeline_files(_named(pipeline), index, listing, pipeline.variant, without)
    return {pipeline.within + name: size for name, size in files.items()}


def _explain_cache(pipeline: ModelSource, index: Mapping[str, Any], folder: Path, without: Sequence[str]) -> None:
    """Raises HubUnreachableError that says which files the cache lacks."""
    try:
        pipeline_files(
            f"{_named(pipeline)}, in the cache", index, folder_listing(folder), pipeline.variant, without
        )
    except MissingFilesError as error:
        raise HubUnreachableError(f"{error}; the hub cannot be reached (is HF_HUB_OFFLINE set?)") from None


def open_pipeline(pipeline_class: type[Any], source: ModelSource, without: Sequence[str]) -> Path:
    """The folder of the pipeline, downloaded if necessary, without the weights of components in `without`."""
    check_one_transformer(source, check_class(pipeline_class, source))
    folder = local_files(pipeline_class, source, without)
    if folder is None:
        pipeline = source.pipeline
        folder = pipeline.repository.download(list(remote_files(source, without))) / pipeline.within
    return folder


def component_files(
    component: str, pipeline_class: type[Any], source: ModelSource, without: Sequence[str] = ()
) -> tuple[Path, ...]:
    """A component's files in a pipeline folder that `open_pipeline` has returned for this source."""
    folder = open_pipeline(pipeline_class, source, without)
    files = _files_in(folder, source.pipeline, pipeline_class, without)
    return tuple(
        folder / name for name in files if name.startswith(f"{component}/") and name.endswith(SINGLE_FILE)
    )


# --- Single files -----------------------------------------------------------------------------------------------


def check_single_file(path: Path) -> dict[str, HeaderEntry]:
    """The tensors of the transformer in a single file; raises ConfigError if it cannot be loaded."""
    if not path.is_file():
        on_hub = HUB_FILE.fullmatch(str(path))
        hint = f"; download it with: hf download {on_hub['id']} {on_hub['file']}" if on_hub else ""
        raise ConfigError(f"{path}: no such file{hint}")
    if path.suffix != SINGLE_FILE:
        raise ConfigError(f"{path}: {_why_not(path)}; expected a {SINGLE_FILE} file with 16 or 32 bit weights")
    tensors = read_header(path)
    if any("lora_" in name or ".lora." in name for name in tensors):
        raise ConfigError(f"{path}: is a LoRA, not a model; as model.source, give the model that it adapts")
    transformer = transformer_tensors(tensors)
    quantized = [name for name in tensors if any(word in name for word in QUANTIZED)]
    quantized += [
        f"{name}: {entry.dtype}" for name, entry in transformer.items() if entry.dtype.startswith(EIGHT_BIT)
    ]
    if quantized:
        raise ConfigError(
            f"{path}: holds quantized weights ({quantized[0]}), which cannot be trained; expected a file with "
            "16 or 32 bit weights"
        )
    return transformer


def transformer_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The transformer's tensors without the prefix that their names have in some files."""
    for prefix in PREFIXES:
        inside = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if inside:
            return inside
    return dict(tensors)


def _why_not(path: Path) -> str:
    if path.suffix == ".gguf":
        return "GGUF weights are quantized and cannot be trained"
    if path.suffix in PICKLES:
        return "pickled, which can run code"
    return "not a model file"


def _files_in(
    folder: Path, pipeline: ModelSource, pipeline_class: type[Any], without: Sequence[str]
) -> dict[str, int]:
    """The files to load from a pipeline's folder; raises ConfigError if some are missing, or for another class."""
    index = check_class(pipeline_class, pipeline)
    files = pipeline_files(_named(pipeline), index, folder_listing(folder), pipeline.variant, without)
    for name in files:
        if name.endswith("/config.json") and "quantization_config" in read_mapping(folder / name):
            component = name.rpartition("/")[0]
            raise ConfigError(
                f"{_named(pipeline)}: {component} has quantized weights, which cannot be loaded; use the original "
                "ones, and quantize them with model.base and model.encoder_base"
            )
    return files


def _named(pipeline: ModelSource) -> str:
    at = f"@{pipeline.revision}" if pipeline.revision and pipeline.kind == "hub" else ""
    return f"{pipeline.location}{at}" + (f", {pipeline.subfolder}" if pipeline.subfolder else "")
