"""`digenrl check` names what a model is, downloads nothing large unasked, and compares it with diffusers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from doc_pages import DOCS, DocPage
from hub_stand_in import HubStandIn, serving
from original_names import write_original_file
from PIL import Image
from published_layouts import LAYOUTS, make_published_layout
from source_pictures import picture
from tokenizers import Tokenizer
from typer.testing import CliRunner

from digenrl.cli import app, main
from digenrl.commands.support import output
from digenrl.config.reading import ConfigError
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import make_tiny_pipeline

PROBE = "A cat on a red car"
SMALL = ["sample.height=32", "sample.width=32"]
# With and without source images, several tokenizers, a processor, components that are not used, and a UNet.
CHECKED = ("sd3", "flux_kontext", "qwen_image_2_1", "sdxl", "wan_i2v")  # of every task


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines of all kinds, in the layout of their published repository if that is known."""
    root = tmp_path_factory.mktemp("tiny")
    for family in (*CHECKED, "wan"):
        (make_published_layout if family in LAYOUTS else make_tiny_pipeline)(family, root / family)
    return root


@pytest.fixture
def hub(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A hub with the repository me/sd3, and an empty cache."""
    shutil.copytree(folders / "sd3", tmp_path / "hub" / "me" / "sd3")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def check(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["check", *words, "--probe", PROBE, "--json"])
    if result.exception is not None:
        raise result.exception
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def refusal(*words: str) -> str:
    before = list(Path.cwd().iterdir())
    with pytest.raises(ConfigError) as error:
        check(*words)
    assert "\n" not in str(error.value)
    assert list(Path.cwd().iterdir()) == before  # nothing half-written
    return str(error.value)


@pytest.mark.parametrize("family", CHECKED)
def test_a_model_is_named_tokenized_sampled_and_compared(family: str, folders: Path) -> None:
    answer = check(str(folders / family), "sample.height=32", "sample.width=32")
    assert answer["family"] == family
    assert answer["tasks"] == list(FAMILIES[family].tasks)
    assert answer["max_difference"] < 1e-4
    assert answer["fits"] and answer["bytes_needed"] > 0 and answer["bytes_to_download"] == 0
    assert Image.open(answer["picture"]).size == (32, 32)
    tokenizers = sorted(path.parent.name for path in (folders / family).glob("*/tokenizer_config.json"))
    assert sorted(answer["probe"]["token_ids"]) == tokenizers
    for name, token_ids in answer["probe"]["token_ids"].items():
        file = folders / family / name / "tokenizer.json"
        if file.exists():
            assert token_ids == Tokenizer.from_file(str(file)).encode(PROBE).ids
    if family == "sd3":  # others batch the branches of guidance in another way
        assert answer["max_difference"] == 0


def test_a_recipe_is_checked_with_its_size_dtype_and_guidance(folders: Path) -> None:
    source = f"model.source={folders / 'sd3'}"
    answer = check("sd3_flow_grpo", source, *SMALL, "model.dtype=bfloat16", "model.guidance=1")
    assert (answer["dtype"], answer["height"]) == ("bfloat16", 32)
    assert 0 < answer["max_difference"] < 0.1  # diffusers rounds the latents to bfloat16 after every step
    assert "model.family=sd3" in refusal("flux_flow_grpo", source)
    assert check("sd3_flow_grpo", "model.source=random")["skipped"]


@pytest.mark.parametrize("family", ["flux_kontext", "sdxl"])
def test_models_are_compared_in_bfloat16_beside_a_vae_in_float32(family: str, folders: Path) -> None:
    """Their diffusers pipelines cast neither source images nor latents."""
    answer = check(str(folders / family), *SMALL, "model.dtype=bfloat16")
    assert 0 < answer["max_difference"] < 0.5


def test_images_of_prompts_are_decoded_before_the_model_is_loaded(folders: Path, tmp_path: Path) -> None:
    """Sources and pairs, each once; the first that is damaged is named by its line."""
    picture(1, 32, 32).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:-100])

    def prompts(*images: str | list[str]) -> str:
        rows = [{"prompt": f"edit {index}", "image": image} for index, image in enumerate(images)]
        (tmp_path / "edits.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return f"prompts.path={tmp_path / 'edits.jsonl'}"

    recipe = ("flux_kontext_one_gpu", f"model.source={folders / 'flux_kontext'}", "evaluation=off", *SMALL)
    recipe = (*recipe, "model.text_tokens=20", "model.dtype=float32")
    for damaged, why in (("cut.png", "decoded"), ("absent.png", "does not exist")):
        assert re.search(rf"edits\.jsonl:2: .*{damaged}.*{why}", refusal(*recipe, prompts("good.png", damaged)))
    assert check(*recipe, prompts("good.png", "good.png"))["images_decoded"] == 1
    assert "flux_kontext takes at most 1" in refusal(*recipe, prompts(["good.png", "good.png"]))


def test_a_hub_id_is_described_and_downloaded_only_if_asked(hub: HubStandIn) -> None:
    answer = check("me/sd3", *SMALL)
    assert answer["family"] == "sd3" and answer["fits"]
    assert answer["bytes_to_download"] == sum(answer["files"].values())
    assert "--download" in answer["skipped"] and answer["max_difference"] is None
    assert set(hub.served) <= {"model_index.json", "transformer/config.json", "vae/config.json"}
    downloaded = check("me/sd3", *SMALL, "--download")
    assert downloaded["max_difference"] == 0
    assert set(hub.served) <= set(answer["files"])
    again = check("me/sd3", *SMALL)  # now in the cache
    assert again["max_difference"] == 0 and again["bytes_to_download"] == 0


def test_a_class_that_no_family_takes_stops_after_its_index(hub: HubStandIn) -> None:
    fill = hub.root / "me" / "fill"
    (fill / "transformer").mkdir(parents=True)
    (fill / "model_index.json").write_text(json.dumps({"_class_name": "FluxFillPipeline"}))
    (fill / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(bytes(1_000_000))
    assert "no family takes" in refusal("me/fill")
    assert "takes a FluxPipeline" in refusal("flux_flow_grpo", "model.source=me/fill")
    assert list(hub.served) == ["model_index.json"]
    (hub.root / "me" / "gguf").mkdir()
    (hub.root / "me" / "gguf" / "flux.gguf").write_bytes(bytes(1000))
    assert "no model_index.json" in refusal("me/gguf")


def test_a_single_file_is_checked_with_its_base(folders: Path, tmp_path: Path) -> None:
    path = tmp_path / "wan.safetensors"
    write_original_file("wan", folders / "wan", path)
    assert "model.family=" in refusal(str(path))
    answer = check(str(path), f"model.base_source={folders / 'wan'}", *SMALL)
    assert (answer["family"], answer["kind"]) == ("wan", "file")
    assert str(path) in answer["files"] and answer["max_difference"] < 1e-4


def test_a_folder_with_only_fp16_files_names_the_key_and_is_checked_with_it(tmp_path: Path) -> None:
    make_published_layout("sd3", tmp_path / "half", variant="fp16")
    assert "model.variant=fp16" in refusal(str(tmp_path / "half"))
    assert check(str(tmp_path / "half"), "model.variant=fp16", *SMALL)["max_difference"] == 0


def test_sources_that_cannot_be_used_are_one_line(folders: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folders / "sd3", tmp_path / "broken"))
    weights = broken / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "damaged" in refusal(str(broken))
    weights.unlink()
    assert "vae has no weights" in refusal(str(broken))
    (broken / "model_index.json").write_text("{")
    assert "damaged" in refusal(str(broken))
    (broken / "model_index.json").unlink()
    assert "no model_index.json" in refusal(str(broken))
    (broken / "run.json").write_text("{}")
    assert f"digenrl export {broken} --to merged" in refusal(str(broken))
    assert "no such directory" in refusal("./nowhere")
    assert "did you mean 'sd3_flow_grpo'" in refusal("sd3_flow_grp")
    assert "owner/name" in refusal("https://huggingface.co/me/sd3")
    assert "ends in .png" in refusal(str(folders / "sd3"), "--out", "picture")
    assert "--probe" in str(CliRunner().invoke(app, ["check", "demo", "--probe", " "]).exception)


def test_a_run_on_the_wrong_model_stops_before_anything_is_written(hub: HubStandIn) -> None:
    Path("prompts.txt").write_text("a cat\n")
    words = ["prompts.path=prompts.txt", "model.source=me/sd3", "mode=colocated", "evaluation=null"]
    result = CliRunner().invoke(app, ["train", "flux_flow_grpo", *words])
    assert isinstance(result.exception, ConfigError) and "model.family=sd3" in str(result.exception)
    assert [path.name for path in Path.cwd().iterdir()] == ["prompts.txt"]
    assert list(hub.served) == ["model_index.json"]


def test_a_gated_repository_is_exit_code_2_and_one_line(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.gated.add("me/sd3")
    monkeypatch.setattr(sys, "argv", ["digenrl", "check", "me/sd3"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and f"license at {hub.endpoint}/me/sd3" in printed.err
    assert not printed.out


def test_the_documented_example_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 200)
    (example,) = DocPage(DOCS / "models.md").blocks("text")
    command, *rows = example.splitlines()
    probe = re.search('--probe "(.*)"', command)
    assert probe is not None
    printed = CliRunner().invoke(app, ["check", "demo", "--probe", probe[1]]).stdout
    for row in rows:
        name, text = re.split(r"\s{2,}", row.strip(), maxsplit=1)
        pattern = re.escape(text)
        if name in ("memory", "cpu"):  # sizes depend on the machine and on the planner
            pattern = re.sub(r"[\d.\\]+\\ [MG]B", r"[\\d.]+ [MG]B", pattern)
        if name != "source":
            assert re.search(rf"^{name}\s+{pattern}\s*$", printed, re.MULTILINE), row
