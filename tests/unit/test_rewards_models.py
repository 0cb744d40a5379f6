"""Rewards with weights, compared with their published formulas, computed here from the saved tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import logging as hub_logging
from PIL import Image
from safetensors.torch import save_file
from tiny_rewards import BLIP_SIDE, head_state, save_clip, save_image_reward, to_open_clip
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear, softmax
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel, CLIPTextConfig, CLIPTextModel

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.config.rewards.table import parse_reward
from digenrl.rewards.building import build_reward
from digenrl.rewards.contract import as_pil, as_uint8
from digenrl.rewards.image_reward import preprocessed
from digenrl.rewards.parts.clip import letterboxed
from digenrl.rewards.parts.weights import load_pretrained
from digenrl.worker.checks.preflight import inspect_here

PIXELS = torch.rand(3, 1, 3, 40, 52, generator=torch.Generator().manual_seed(5))
PROMPTS = ["a cat", "two dogs, one ball", "x" * 60]  # the last is longer than the model reads
METADATA = [{}, {}, {}]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_reward(tmp_path_factory.mktemp("image_reward"))


def scores(name: str, pixels: Tensor = PIXELS, **settings: object) -> tuple[float, ...]:
    reward = build_reward(parse_reward({"name": name, "device": "cpu", **settings}))
    return reward.score(pixels, PROMPTS[: len(pixels)], METADATA[: len(pixels)]).values


def logits(directory: Path, pixels: Tensor = PIXELS) -> tuple[Tensor, float]:
    """The model's own image-text logits for every image with its prompt, and its scale."""
    model = CLIPModel.from_pretrained(directory).eval()
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    images = processor(images=list(as_pil(as_uint8(pixels[:, 0]))), return_tensors="pt")
    tokens = tokenizer(PROMPTS, padding=True, truncation=True, max_length=40, return_tensors="pt")
    with torch.no_grad():
        answer = model(pixel_values=images["pixel_values"], **tokens)
    return answer.logits_per_image.diagonal(), float(model.logit_scale.detach().exp())


def test_pickscore_is_the_logit_and_the_others_are_the_cosine(clip: Path) -> None:
    expected, scale = logits(clip)
    assert scale > 5
    assert scores("pickscore", model=str(clip)) == pytest.approx(expected.tolist(), abs=1e-4)
    square = PIXELS[..., :40]
    fitting = PIXELS[..., :32, :32]  # not resized
    for name, pixels in (("clip_score", PIXELS), ("clip_score", square), ("hpsv2", fitting)):
        expected, _ = logits(clip, pixels)
        assert scores(name, pixels, model=str(clip)) == pytest.approx((expected / scale).tolist(), abs=1e-5)


def test_hpsv2_sees_the_whole_of_an_image_that_is_not_square(clip: Path) -> None:
    wide = torch.rand(1, 1, 3, 16, 48, generator=torch.Generator().manual_seed(3))
    other_edges = wide.clone()
    other_edges[..., :8], other_edges[..., -8:] = 0, 1
    assert scores("hpsv2", wide, model=str(clip)) != scores("hpsv2", other_edges, model=str(clip))
    assert scores("clip_score", wide, model=str(clip)) == scores("clip_score", other_edges, model=str(clip))
    square = letterboxed(Image.new("RGB", (64, 31), "white"), 32)
    rows = [row for row in range(32) if square[:, row].mean() > 0.99]
    assert square.shape == (3, 32, 32) and rows == list(range(8, 24)), "a row more is black below than above"


def test_hpsv2_resizes_as_published() -> None:
    """The numbers are those of `ResizeMaxSize(4)` after `ToTensor()`, of the package hpsv2 1.2.0."""
    image = Image.new("RGB", (6, 3))
    image.paste((255, 255, 255), (3, 0, 6, 3))
    image.paste((60, 60, 60), (0, 2, 6, 3))
    whole = torch.tensor([[-0.0179, 0.0383, 0.9829, 1.0391], [0.1501, 0.1690, 0.4868, 0.5057]])
    rows = torch.cat([torch.zeros(1, 4), whole, torch.zeros(1, 4)])
    torch.testing.assert_close(letterboxed(image, 4), rows.expand(3, -1, -1), atol=6e-5, rtol=0)


def test_scores_do_not_depend_on_the_batch_size(clip: Path, blip: Path) -> None:
    for name, model in (("pickscore", clip), ("image_reward", blip)):
        together = scores(name, model=str(model))
        assert scores(name, model=str(model), batch_size=2) == pytest.approx(together, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_hpsv2_loads_the_published_file_into_the_base_model(clip: Path, tmp_path: Path, suffix: str) -> None:
    tuned = save_clip(tmp_path / "tuned", seed=9)
    state = to_open_clip(CLIPModel.from_pretrained(tuned))
    file = tmp_path / f"HPS{suffix}"
    save_file(state, file) if suffix == ".safetensors" else torch.save({"state_dict": state, "epoch": 1}, file)
    with_file = scores("hpsv2", model=str(clip), checkpoint=str(file))
    assert with_file == scores("hpsv2", model=str(tuned))
    assert with_file != scores("hpsv2", model=str(clip))
    state.pop("visual.ln_post.bias")
    torch.save(state, tmp_path / "short.pt")
    with pytest.raises(ConfigError, match=r"short\.pt: .*'vision_model\.post_layernorm\.bias'"):
        scores("hpsv2", model=str(clip), checkpoint=str(tmp_path / "short.pt"))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_aesthetic_is_the_head_on_the_normalized_image_embedding(clip: Path, tmp_path: Path, suffix: str) -> None:
    state, file = head_state(24), tmp_path / f"head{suffix}"
    save_file(state, file) if suffix == ".safetensors" else torch.save(state, file)
    model = CLIPModel.from_pretrained(clip).eval()
    images = AutoImageProcessor.from_pretrained(clip, backend="pil")(
        images=list(as_pil(as_uint8(PIXELS[:, 0]))), return_tensors="pt"
    )
    with torch.no_grad():
        features = model.visual_projection(model.vision_model(**images).pooler_output)
    features = features / features.norm(dim=-1, keepdim=True)
    for at in (0, 2, 4, 6, 7):
        features = features @ state[f"layers.{at}.weight"].T + state[f"layers.{at}.bias"]
    assert scores("aesthetic", model=str(clip), head=str(file)) == pytest.approx(features[:, 0].tolist(), abs=1e-5)


def test_a_head_of_another_width_is_an_error(clip: Path, tmp_path: Path) -> None:
    torch.save(head_state(768), tmp_path / "large.pth")
    with pytest.raises(ConfigError, match=r"768 features.*24"):
        scores("aesthetic", model=str(clip), head=str(tmp_path / "large.pth"))
    with pytest.raises(ConfigError, match=r"absent\.pth: no such file"):
        scores("aesthetic", model=str(clip), head=str(tmp_path / "absent.pth"))


class Trap:
    """Would run code when unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code of a weights file was run')",))


def test_a_weights_file_that_would_run_code_is_rejected(clip: Path, tmp_path: Path) -> None:
    torch.save({"layers.0.weight": Trap()}, tmp_path / "evil.pth")
    with pytest.raises(ConfigError, match=r"evil\.pth: .*tensors"):
        scores("aesthetic", model=str(clip), head=str(tmp_path / "evil.pth"))


def test_missing_weights_and_weights_of_another_model_are_errors(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: no such directory"):
        scores("clip_score", model=str(tmp_path / "absent"))
    config = CLIPTextConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 1
    CLIPTextModel(config).save_pretrained(tmp_path / "text")
    with pytest.raises(ConfigError, match="'clip_text_model'"):
        scores("clip_score", model=str(tmp_path / "text"))


@pytest.mark.parametrize(
    ("reward", "key"),
    [
        ({"name": "pickscore", "model": "./absent"}, "model"),
        ({"name": "hpsv2", "model": "owner/name", "checkpoint": "absent.pt"}, "checkpoint"),
        ({"name": "aesthetic", "head": "absent.pth"}, "head"),
        ({"name": "geneval", "detector": "one/two/absent"}, "detector"),
        ({"name": "image_reward", "tokenizer": "./absent"}, "tokenizer"),
    ],
)
def test_weights_and_files_that_are_not_there_are_reported_before_a_run(
    reward: dict[str, object], key: str
) -> None:
    overrides = [f"rewards={json.dumps(reward)}", "evaluation=off"]
    with pytest.raises(ConfigError, match=rf"reward '{reward['name']}': {key}: .*absent.*: no such"):
        inspect_here(read_recipe("demo", overrides))
    inspect_here(read_recipe("demo", [*overrides, "mode=ray"]))  # another machine may have them


def test_a_checkpoint_with_a_missing_weight_is_an_error_instead_of_a_random_weight(
    tmp_path: Path,
) -> None:
    directory = save_clip(tmp_path / "clip")
    state = CLIPModel.from_pretrained(directory).state_dict()
    state.pop("text_projection.weight")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'text_projection\.weight'"):
        scores("clip_score", model=str(directory))


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Attention, one head after the other."""
    outputs = []
    pieces = zip(*(x.chunk(heads, dim=-1) for x in (query, key, value)), strict=True)
    for q, k, v in pieces:
        weights = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            weights = weights.masked_fill(~mask[:, None, :], float("-inf"))
        outputs.append(softmax(weights, dim=-1) @ v)
    return torch.cat(outputs, dim=-1)


def image_features(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """The ViT of BLIP as its authors wrote it: norm first, one matrix for query, key and value."""

    def apply(name: str, x: Tensor) -> Tensor:
        return linear(x, state[f"blip.visual_encoder.{name}.weight"], state[f"blip.visual_encoder.{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        weight, bias = (state[f"blip.visual_encoder.{name}.{kind}"] for kind in ("weight", "bias"))
        return layer_norm(x, weight.shape, weight, bias, eps=1e-6)

    patch = [state[f"blip.visual_encoder.patch_embed.proj.{kind}"] for kind in ("weight", "bias")]
    x = conv2d(images, patch[0], patch[1], stride=16).flatten(2).transpose(1, 2)
    first = state["blip.visual_encoder.cls_token"].expand(len(x), -1, -1)
    x = torch.cat([first, x], dim=1) + state["blip.visual_encoder.pos_embed"]
    for layer in range(2):
        query, key, value = apply(f"blocks.{layer}.attn.qkv", norm(f"blocks.{layer}.norm1", x)).chunk(3, dim=-1)
        x = x + apply(f"blocks.{layer}.attn.proj", attend(query, key, value, heads=2))
        hidden = gelu(apply(f"blocks.{layer}.mlp.fc1", norm(f"blocks.{layer}.norm2", x)))
        x = x + apply(f"blocks.{layer}.mlp.fc2", hidden)
    return norm("norm", x)


def text_features(state: dict[str, Tensor], ids: Tensor, mask: Tensor, image: Tensor) -> Tensor:
    """BERT with an attention to the image after each attention to the text; norm last."""
    root = "blip.text_encoder"

    def apply(name: str, x: Tensor) -> Tensor:
        return linear(x, state[f"{root}.{name}.weight"], state[f"{root}.{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return layer_norm(x, (32,), state[f"{root}.{name}.weight"], state[f"{root}.{name}.bias"], eps=1e-12)

    embeddings = f"{root}.embeddings"
    x = state[f"{embeddings}.word_embeddings.weight"][ids]
    x = norm("embeddings.LayerNorm", x + state[f"{embeddings}.position_embeddings.weight"][: ids.shape[1]])
    for layer in range(2):
        block = f"encoder.layer.{layer}"
        for kind, seen, seen_mask in (("attention", None, mask), ("crossattention", image, None)):
            other = x if seen is None else seen
            query = apply(f"{block}.{kind}.self.query", x)
            key, value = apply(f"{block}.{kind}.self.key", other), apply(f"{block}.{kind}.self.value", other)
            out = apply(f"{block}.{kind}.output.dense", attend(query, key, value, heads=2, mask=seen_mask))
            x = norm(f"{block}.{kind}.output.LayerNorm", out + x)
        hidden = apply(f"{block}.output.dense", gelu(apply(f"{block}.intermediate.dense", x)))
        x = norm(f"{block}.output.LayerNorm", hidden + x)
    return x


def test_image_reward_is_blip_and_the_head_as_published(blip: Path) -> None:
    state = torch.load(blip / "ImageReward.pt", weights_only=True)
    tokens = AutoTokenizer.from_pretrained(blip)(
        PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt"
    )
    image = image_features(state, preprocessed(as_uint8(PIXELS[:, 0]), BLIP_SIDE))
    feature = text_features(state, tokens["input_ids"], tokens["attention_mask"].bool(), image)[:, 0]
    for at in (0, 2, 4, 6, 7):
        feature = feature @ state[f"mlp.layers.{at}.weight"].T + state[f"mlp.layers.{at}.bias"]
    expected = (feature[:, 0] - 0.16717362830052426) / 1.0333394966054072
    assert expected.std() > 0.01
    assert scores("image_reward", model=str(blip)) == pytest.approx(expected.tolist(), abs=1e-4)


def test_image_reward_cuts_the_middle_square_of_the_scaled_image() -> None:
    wide = torch.zeros(1, 3, 64, 192, dtype=torch.uint8)
    wide[..., 64:128] = 255
    middle = preprocessed(wide, 32)
    assert middle.shape == (1, 3, 32, 32)
    white = (1 - torch.tensor([0.48145466, 0.4578275, 0.40821073])) / torch.tensor(
        [0.26862954, 0.26130258, 0.27577711]
    )
    torch.testing.assert_close(middle[0, :, 16, 16], white)


def test_a_directory_without_the_published_files_is_an_error(blip: Path, clip: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ImageReward\.pt: no such file"):
        scores("image_reward", model=str(clip))
    broken = save_image_reward(tmp_path / "broken")
    (broken / "med_config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(ConfigError, match=r"med_config\.json: "):
        scores("image_reward", model=str(broken))
    torch.save(head_state(32), broken / "ImageReward.pt")
    (broken / "med_config.json").write_text((blip / "med_config.json").read_text())
    with pytest.raises(ConfigError, match="ImageReward"):
        scores("image_reward", model=str(broken))


def test_retries_of_the_hub_are_not_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = hub_logging.get_logger()
    monkeypatch.setattr(hub, "propagate", True)

    def load(where: str, **options: object) -> None:
        hub.warning("Retrying in 1s")
        raise OSError("no connection")

    with pytest.raises(ConfigError, match="no connection"):
        load_pretrained(load, "owner/name")
    assert "Retrying" not in caplog.text
    hub.warning("Retrying in 1s")
    assert "Retrying" in caplog.text
