"""Pipelines in the layout of the published repositories load, encode, generate, train and save."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import sentencepiece
import torch
from published_layouts import LAYOUTS, drop_t5, layout_size, make_published_layout
from rich.console import Console
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from digenrl.commands.train import resume_run, start_run
from digenrl.config.reading import ConfigError
from digenrl.models.loading.tokenizers import PROBE, faithful_tokenizer
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import FAMILIES
from digenrl.run_folder.folder import Status
from digenrl.run_folder.lines import located_lines

PROMPT = "A cat walks on the grass"
TEXTS = (PROMPT, PROBE, "", "a sign that says “HELLO  World”\n\n\tand  more", "naïve 東京 🙂")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CLIP_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class Written:
    """A folder in a published layout, and the pipeline that was written to it."""

    def __init__(self, family: str, directory: Path) -> None:
        self.family, self.directory = family, directory
        self.pipeline = make_published_layout(family, directory)
        self.model: PipelineModel = FAMILIES[family].load(directory)

    def tokenizers(self) -> dict[str, Any]:
        """The tokenizers as our loader has loaded them."""
        components = self.model.pipeline.components.items()
        return {name: part for name, part in components if isinstance(part, PreTrainedTokenizerBase)}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(request.param, tmp_path_factory.mktemp("published") / request.param)


def ids_of_file(folder: Path) -> Callable[[str], list[int]]:
    """Token ids by the files of a tokenizer, without transformers."""
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda text: list(tokenizer.encode(text).ids)
    special = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    is_clip = "<|startoftext|>" in (folder / "vocab.json").read_text()
    suffix = {"end_of_word_suffix": "</w>"} if is_clip else {}
    bpe = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"), **suffix))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.normalizer, split = normalizers.NFC(), pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    if is_clip:
        bpe.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        split = pre_tokenizers.Split(Regex(CLIP_SPLIT), behavior="removed", invert=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.add_special_tokens([token["content"] for token in special.values()])
    begin, end = (
        (bpe.token_to_id("<|startoftext|>"), bpe.token_to_id("<|endoftext|>")) if is_clip else (None, None)
    )
    return lambda text: [token for token in (begin, *bpe.encode(text).ids, end) if token is not None]


def test_token_ids_are_those_of_the_tokenizer_files(written: Written) -> None:
    tokenizers = written.tokenizers()
    assert tokenizers.keys() == LAYOUTS[written.family].tokenizers.keys()
    for name, tokenizer in tokenizers.items():
        expected = ids_of_file(written.directory / name)
        for text in TEXTS:
            assert tokenizer(text, verbose=False).input_ids == expected(text), (name, text)


@torch.no_grad()
def test_all_components_compute_as_when_they_were_written(written: Written) -> None:
    for name, component in written.pipeline.components.items():
        loaded = getattr(written.model.pipeline, name)
        if not isinstance(component, torch.nn.Module):
            continue
        if name.startswith("text_encoder"):  # also what is not in a file: tied weights, rotary tables, pooling
            ids = torch.arange(5, 25).remainder(component.config.get_text_config().vocab_size)[None]
            theirs = component.eval()(ids, output_hidden_states=True).hidden_states
            ours = loaded(ids, output_hidden_states=True).hidden_states
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), name
        written_weights, weights = component.state_dict(), loaded.state_dict()
        assert written_weights.keys() == weights.keys()
        assert all(torch.equal(weights[key], value) for key, value in written_weights.items()), name


def test_a_prompt_reaches_the_transformer(written: Written) -> None:
    """A template that takes more tokens than the pipeline cuts off would hide the prompt's first words."""
    one, other = (written.model.encode([prompt]) for prompt in ("red cat", "two dogs"))
    text = next(name for name, value in one.positive.items() if value is not None and value.ndim == 3)
    assert not torch.equal(one.positive[text], other.positive[text])


def test_only_a_tokenizer_that_disagrees_with_its_file_is_replaced(
    written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    """UMT5's class joins line breaks to words, Llama's splits nothing at spaces."""
    with caplog.at_level(logging.WARNING, "digenrl"):
        FAMILIES[written.family].load_text_encoders(written.directory)
    folders = [record.args[0] for record in caplog.records if record.name == "digenrl.models.loading.tokenizers"]
    replaced = {"wan": ["tokenizer"], "hunyuan_video": ["tokenizer"]}.get(written.family, [])
    assert folders == [written.directory / name / "tokenizer.json" for name in replaced]


def test_training_saves(written: Written, tmp_path: Path) -> None:
    train(written.family, written.directory, tmp_path)


def train(family: str, directory: Path, tmp_path: Path) -> None:
    size = layout_size(family)
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    recipe = {
        "steps": 1,
        "mode": "colocated",
        "model": {"family": family, "source": str(directory), "text_tokens": 16},
        "prompts": {"path": "prompts.txt"},
        "rewards": "jpeg_compressibility",
        "sample": {"height": size.height, "width": size.width, "frames": size.frames, "denoising_steps": 2},
        "batch": {"prompts": 1, "samples_per_prompt": 2, "slice": 2},
        "algorithm": {"name": "flow_grpo", "options": {"updates_per_batch": 1, "kl_weight": 0}},
        "training": {"pack_size": 2, "lora": {"rank": 2, "alpha": 4}},
        "lanes": {"device": "cpu", "threads": 1},
        "logging": {"tensorboard": False},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    console, run = Console(file=io.StringIO()), tmp_path / "run"
    assert start_run(str(tmp_path / "recipe.json"), (), run, console, True) is Status.FINISHED
    (step,) = located_lines(run / "metrics.jsonl")
    assert step.content["gradient_norm"] > 0
    assert (run / "lora" / "pytorch_lora_weights.safetensors").is_file()


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    LAYOUTS["hunyuan_video"].tokenizers["tokenizer"](tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def as_published(folder: Path, **settings: Any) -> Any:
    """The tokenizer as transformers loads it by the class that HunyuanVideo's repository names."""
    from transformers import LlamaTokenizerFast

    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return LlamaTokenizerFast.from_pretrained(folder)


def test_a_replaced_tokenizer_keeps_its_settings(llama_folder: Path) -> None:
    by_class = as_published(llama_folder, padding_side="left", model_max_length=99)
    kept = faithful_tokenizer(by_class)
    assert kept is not by_class and kept(PROMPT).input_ids != by_class(PROMPT).input_ids
    assert (kept.padding_side, kept.model_max_length) == ("left", 99)
    assert kept.special_tokens_map == by_class.special_tokens_map
    assert kept.decode(kept(PROMPT).input_ids, skip_special_tokens=True) == PROMPT
    padded = kept(["a", PROMPT], padding="max_length", max_length=20)
    assert padded.input_ids[0][0] == kept.pad_token_id and set(padded) == {"input_ids", "attention_mask"}


def test_a_tokenizer_of_a_hub_id_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layout of the hub's local cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "models--someone--HunyuanVideo", "0" * 40
    make_published_layout("hunyuan_video", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    model = FAMILIES["hunyuan_video"].load_text_encoders("someone/HunyuanVideo")
    expected = ids_of_file(repository / "snapshots" / commit / "tokenizer")
    assert model.pipeline.tokenizer(PROMPT).input_ids == expected(PROMPT)


def test_t5_with_only_a_sentencepiece_model_tokenizes_as_sentencepiece(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    LAYOUTS["flux"].tokenizers["tokenizer_2"](folder)
    (folder / "tokenizer.json").unlink()
    from transformers import T5TokenizerFast

    tokenizer = faithful_tokenizer(T5TokenizerFast.from_pretrained(folder))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    for text in TEXTS:
        assert tokenizer(text, verbose=False).input_ids == [*pieces.encode(text), 1], text


@pytest.mark.parametrize("family", list(LAYOUTS))
def test_files_of_a_variant_are_as_diffusers_expects_them(family: str, tmp_path: Path) -> None:
    make_published_layout(family, tmp_path / "model", variant="fp16")
    pipeline = FAMILIES[family].pipeline_class.from_pretrained(
        tmp_path / "model", variant="fp16", dtype=torch.float32
    )
    weights = [path.name for path in (tmp_path / "model").rglob("*.safetensors")]
    assert weights and all(".fp16" in name for name in weights)
    assert pipeline.transformer.dtype == torch.float32


def test_a_pipeline_without_a_part_that_it_needs_is_refused_in_one_line(tmp_path: Path) -> None:
    make_published_layout("flux", tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "text_encoder_2")
    path = tmp_path / "model" / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_encoder_2": [None, None]}))
    with pytest.raises(ConfigError, match="text_encoder_2"):
        FAMILIES["flux"].load(tmp_path / "model")
    FAMILIES["flux"].load(tmp_path / "model", text_encoders=False)  # lanes that do not encode need none


@torch.no_grad()
def test_sd3_without_t5_computes_as_diffusers_trains_and_resumes(tmp_path: Path) -> None:
    make_published_layout("sd3", tmp_path / "model")
    drop_t5(tmp_path / "model")
    family, size, prompts = FAMILIES["sd3"], layout_size("sd3"), ["a red cat", "two dogs"]
    encoders = family.load_text_encoders(tmp_path / "model", text_tokens=24)
    model = family.load(tmp_path / "model", text_encoders=False, text_tokens=24)
    pipeline = family.pipeline_class.from_pretrained(
        tmp_path / "model", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(2, *model.noise_shape(size), generator=torch.Generator().manual_seed(0))
    (theirs,) = pipeline(
        prompts,
        negative_prompt=["", ""],
        height=size.height,
        width=size.width,
        num_inference_steps=2,
        guidance_scale=4.5,
        max_sequence_length=24,
        latents=noise,
        output_type="latent",
        return_dict=False,
    )
    latents, schedule, text = noise, model.schedule(2, size), encoders.encode(prompts)
    for step, time in enumerate(schedule.timesteps):
        velocity = model.velocity(latents, time.expand(2), text, 4.5, size)
        latents = latents + (schedule.sigmas[step + 1] - schedule.sigmas[step]) * velocity
    assert torch.equal(latents, theirs)
    with torch.enable_grad():
        train("sd3", tmp_path / "model", tmp_path)
        assert resume_run(tmp_path / "run", ("steps=2",), Console(file=io.StringIO()), True) is Status.FINISHED
    assert [step.content["step"] for step in located_lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


def test_wans_prompts_are_repaired_before_they_are_tokenized(tmp_path: Path) -> None:
    make_published_layout("wan", tmp_path / "model")
    model = FAMILIES["wan"].load_text_encoders(tmp_path / "model")
    clean, broken = (model.encode([text]).positive["encoder_hidden_states"] for text in ("it's", "itâ€™s"))
    assert clean is not None and broken is not None and torch.equal(clean, broken)
